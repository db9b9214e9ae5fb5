"""Tensors of families that store them otherwise."""

import dataclasses

import numpy as np
import pytest

from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.layout import arranged
from ssd_jax.checkpoints.weights.tensors import TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.registry import FAMILIES
from ssd_jax.models.mechanisms import Mechanisms
from ssd_jax.testing import tiny

ATTENTION = "model.layers.1.self_attn"
CONFIG = ModelConfig.from_hf(tiny.config("llama"))
HEADS, KV_HEADS, SIZE, HIDDEN = 4, 2, 8, 32


class Stored(TensorSource):
    """Tensors in memory, of distinct numbers."""

    def __init__(self, **shapes):
        rng = np.random.default_rng(0)
        self.arrays = {
            name.replace("__", "."): rng.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        self.shapes = {name: array.shape for name, array in self.arrays.items()}

    def read_part(self, name, part):
        return self.arrays[name][part]


def of(family, stored, **mechanisms):
    config = dataclasses.replace(CONFIG, family=family, mechanisms=Mechanisms(**mechanisms))
    return arranged(stored, config, FAMILIES[family].layout, where="here")


def test_files_with_the_usual_names_and_rows_are_read_as_they_are():
    stored = Stored(model__norm__weight=(HIDDEN,))
    assert of("llama", stored) is stored


def test_joined_matrices_are_split_by_rows():
    rows = (HEADS + 2 * KV_HEADS) * SIZE
    stored = Stored(**{f"{ATTENTION}.qkv_proj.weight": (rows, HIDDEN), "lm_head.weight": (9, 3)})
    tensors, joined = of("phi3", stored), stored.arrays[f"{ATTENTION}.qkv_proj.weight"]
    q, k, v = (tensors.read(f"{ATTENTION}.{part}_proj.weight") for part in "qkv")
    np.testing.assert_array_equal(np.concatenate([q, k, v]), joined)
    assert (len(q), len(k), len(v)) == (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
    assert tensors.shapes == {
        **{
            f"{ATTENTION}.{p}_proj.weight": (len(m), HIDDEN)
            for p, m in zip("qkv", (q, k, v), strict=True)
        },
        "lm_head.weight": (9, 3),
    }


def test_a_shard_of_a_part_is_read_from_its_place():
    rows = (HEADS + 2 * KV_HEADS) * SIZE
    tensors = of("phi3", Stored(**{f"{ATTENTION}.qkv_proj.weight": (rows, HIDDEN)}))
    name, index = f"{ATTENTION}.k_proj.weight", (slice(3, 9), slice(4, 8))
    np.testing.assert_array_equal(tensors.read(name, index), tensors.read(name)[index])


def test_rows_that_do_not_add_up_are_refused():
    with pytest.raises(InputError, match=r"qkv_proj.weight' has 60 rows.* 32 \+ 16 \+ 16"):
        of("phi3", Stored(**{f"{ATTENTION}.qkv_proj.weight": (60, HIDDEN)}))


MLP = "model.layers.1.mlp.experts"


def test_matrices_of_experts_are_joined_in_the_order_of_their_numbers():
    stored = Stored(**{f"{MLP}.{i}.up_proj.weight": (3, 5) for i in reversed(range(12))})
    tensors, name = of("qwen3_moe", stored), f"{MLP}.up_proj.weight"
    assert dict(tensors.shapes) == {name: (12, 3, 5)}
    assert tensors.shape(name) == (12, 3, 5)
    stacked = np.stack([stored.arrays[f"{MLP}.{i}.up_proj.weight"] for i in range(12)])
    np.testing.assert_array_equal(tensors.read(name), stacked)
    assert tensors.read(name).flags.c_contiguous


def test_of_experts_only_the_part_is_read_that_is_asked_for():
    stored = Stored(**{f"{MLP}.{i}.up_proj.weight": (8, 5) for i in range(12)})
    tensors, name = of("qwen3_moe", stored), f"{MLP}.up_proj.weight"
    index, asked = (slice(10, 12), slice(2, 6)), []
    tensor, read_part = tensors.read(name), stored.read_part
    stored.read_part = lambda name, part: asked.append((name, part)) or read_part(name, part)
    np.testing.assert_array_equal(tensors.read(name, index), tensor[index])
    rows = slice(2, 6), slice(0, 5)
    assert asked == [(f"{MLP}.{i}.up_proj.weight", rows) for i in (10, 11)]


def test_experts_of_mixtral_have_the_names_of_their_parts():
    block = "model.layers.1.block_sparse_moe"
    shapes = {"w1": (3, 5), "w2": (5, 3), "w3": (3, 5)}
    names = {f"{block}.experts.{i}.{w}.weight": s for w, s in shapes.items() for i in range(2)}
    tensors = of("mixtral", Stored(**names, **{f"{block}.gate.weight": (2, 5)}))
    assert dict(tensors.shapes) == {
        "model.layers.1.mlp.router.weight": (2, 5),
        f"{MLP}.gate_proj.weight": (2, 3, 5),
        f"{MLP}.up_proj.weight": (2, 3, 5),
        f"{MLP}.down_proj.weight": (2, 5, 3),
    }


@pytest.mark.parametrize(
    ("shapes", "found"),
    [({0: (3, 5), 2: (3, 5)}, "of 3 experts there are 2, of 1 shapes"),
     ({0: (3, 5), 1: (4, 5)}, "of 2 experts there are 2, of 2 shapes")],
)  # fmt: skip
def test_experts_that_are_missing_or_of_several_shapes_are_refused(shapes, found):
    names = {f"{MLP}.{i}.up_proj.weight": shape for i, shape in shapes.items()}
    with pytest.raises(
        InputError, match=f"up_proj.weight' is stored expert by expert, and {found}"
    ):
        of("qwen3_moe", Stored(**names))


def rotated(x, angles, pairs):
    """x [..., SIZE] with its first dimensions rotated; `pairs` are (first, second) dimensions."""
    out = x.copy()
    for angle, (i, j) in zip(angles, pairs, strict=True):
        out[..., i] = x[..., i] * np.cos(angle) - x[..., j] * np.sin(angle)
        out[..., j] = x[..., j] * np.cos(angle) + x[..., i] * np.sin(angle)
    return out


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_rotating_halves_of_arranged_heads_is_rotating_neighbours_of_stored_ones(rotary_dim):
    shapes = {f"{ATTENTION}.{p}_proj.weight": (h * SIZE, HIDDEN) for p, h in (("q", 4), ("k", 2))}
    stored = Stored(**shapes, **{f"{ATTENTION}.q_proj.bias": (HEADS * SIZE,)})
    tensors, count = of("glm", stored, rotary_dim=rotary_dim), (rotary_dim or SIZE) // 2
    angles = np.linspace(0.3, 2.0, count)
    scores = []
    for source, pairs in (
        (tensors, [(i, i + count) for i in range(count)]),
        (stored, [(2 * i, 2 * i + 1) for i in range(count)]),
    ):
        q, k = (source.read(name).sum(axis=1).reshape(-1, 1, SIZE) for name in shapes)
        q = q + source.read(f"{ATTENTION}.q_proj.bias").reshape(-1, 1, SIZE)
        scores.append(np.sum(rotated(q[:2], angles, pairs) * k, axis=-1))
    np.testing.assert_allclose(*scores, rtol=1e-4)
    name, index = f"{ATTENTION}.q_proj.weight", (slice(5, 19), slice(1, 7))
    np.testing.assert_array_equal(tensors.read(name, index), tensors.read(name)[index])


def test_norms_of_heads_are_arranged_as_the_heads_that_they_norm():
    name = f"{ATTENTION}.q_norm.weight"
    stored = Stored(**{name: (HEADS, SIZE)})
    tensors, weights = of("cohere", stored), stored.arrays[name]
    halves = np.concatenate([weights[:, ::2], weights[:, 1::2]], axis=1)
    np.testing.assert_array_equal(tensors.read(name), halves)
    np.testing.assert_array_equal(tensors.read(name, (slice(1, 3), slice(2, 6))), halves[1:3, 2:6])


def test_norms_that_are_stored_head_by_head_are_joined():
    names = [f"{ATTENTION}.k_layernorm.norms.{head}.weight" for head in range(KV_HEADS)]
    stored = Stored(**dict.fromkeys(names, (SIZE,)))
    read = of("stablelm", stored).read(f"{ATTENTION}.k_norm.weight")
    np.testing.assert_array_equal(read, [stored.arrays[name] for name in names])


def test_a_number_that_the_decoder_has_as_a_constant_is_only_that_one():
    names = [f"model.layers.1.mlp.act_fn.{name}" for name in ("beta", "eps")]
    stored = Stored(**dict.fromkeys(names, ()))
    numbers = np.array([0.5, -1e-6], np.float32)
    stored.arrays = dict(zip(names, numbers, strict=True))
    assert of("apertus", stored).shapes == {}
    stored.arrays[names[0]] += 0.1
    with pytest.raises(InputError, match=r"act_fn.beta' is 0.6\d*, and only 0.5 is supported"):
        of("apertus", stored)


def test_weights_of_norms_get_their_offset_and_biases_do_not():
    stored = Stored(model__norm__weight=(HIDDEN,), model__norm__bias=(HIDDEN,))
    tensors = of("nemotron", stored)
    for name, offset in (("model.norm.weight", 1), ("model.norm.bias", 0)):
        np.testing.assert_array_equal(tensors.read(name), stored.arrays[name] + np.float32(offset))


def test_norms_have_the_names_of_their_places():
    layer = "model.layers.0"
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    tensors = of("olmo2", Stored(**{f"{layer}.{name}.weight": (HIDDEN,) for name in names}))
    assert set(tensors.shapes) == {
        f"{layer}.attention_output_norm.weight",
        f"{layer}.mlp_output_norm.weight",
    }


def test_the_decoder_of_a_model_that_sees_is_read_under_its_usual_names():
    for prefix, rest in (("language_model.model.", ""), ("model.language_model.", "model.")):
        names = (f"{prefix}norm.weight", f"{rest}vision_tower.patch_conv.weight")
        tensors = of("mistral3", Stored(**dict.fromkeys(names, (HIDDEN,))))
        assert set(tensors.shapes) == {"model.norm.weight", names[1]}
        assert len(tensors.read("model.norm.weight")) == HIDDEN


@pytest.mark.parametrize(("family", "joined"), [("phi3", True), ("glm4", False)])
def test_blocks_of_quantised_matrices_are_in_the_order_of_the_rows_that_are_read(family, joined):
    class Blocks(Stored):
        def stored_type(self, name):
            return "Q4_0"

        def read_blocks(self, name):
            return self.arrays[name].view(np.uint8)

    rows = {"qkv_proj": 8 * SIZE} if joined else {"q_proj": 4 * SIZE, "k_proj": 2 * SIZE}
    stored = Blocks(**{f"{ATTENTION}.{key}.weight": (n, HIDDEN) for key, n in rows.items()})
    tensors = of(family, stored, rotary_dim=SIZE // 2)
    for part in "qk":
        name = f"{ATTENTION}.{part}_proj.weight"
        assert tensors.stored_type(name) == "Q4_0"
        np.testing.assert_array_equal(
            tensors.read_blocks(name).view(np.float32), tensors.read(name)
        )


@pytest.mark.parametrize(("family", "joined"), [("phi3", True), ("glm4", False)])
def test_matrices_in_groups_are_in_the_order_of_the_rows_that_are_read(family, joined):
    class InGroups(Stored):
        def group_form(self, name):
            return GroupForm("int8", HIDDEN)

        def read_groups(self, name, rows):
            array = self.arrays[name][rows]
            return StoredGroups(array[:, 1:], array[:, :1])

    rows = {"qkv_proj": 8 * SIZE} if joined else {"q_proj": 4 * SIZE, "k_proj": 2 * SIZE}
    stored = InGroups(**{f"{ATTENTION}.{key}.weight": (n, HIDDEN) for key, n in rows.items()})
    tensors = of(family, stored, rotary_dim=SIZE // 2)
    for part in "qk":
        name = f"{ATTENTION}.{part}_proj.weight"
        assert tensors.group_form(name) == GroupForm("int8", HIDDEN)
        for rows in (slice(0, 2 * SIZE), slice(3, 13)):
            values, scales, minima = tensors.read_groups(name, rows)
            assert minima is None
            found = np.concatenate([scales, values], axis=1)
            np.testing.assert_array_equal(found, tensors.read(name, (rows,)))
