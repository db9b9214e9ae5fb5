"""What a group of devices cuts of a model, and what each device holds whole."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.models.golden import FLOAT32

SHAPE = {"num_attention_heads": 8, "intermediate_size": 48, "vocab_size": 320}


@pytest.mark.parametrize(
    ("devices", "changes", "cut"),
    [
        (4, {"num_key_value_heads": 4}, {"attention", "ffn", "vocab", "pages"}),
        (4, {"num_key_value_heads": 2}, {"attention", "ffn", "vocab", "pages"}),
        (4, {"num_key_value_heads": 1}, {"attention", "ffn", "vocab", "pages"}),
        (4, {"num_attention_heads": 6, "num_key_value_heads": 2}, {"ffn", "vocab"}),
        (6, {"num_attention_heads": 8, "num_key_value_heads": 2}, {"ffn"}),
        (4, {"num_key_value_heads": 4, "intermediate_size": 50}, {"attention", "vocab", "pages"}),
        (4, {"num_key_value_heads": 4, "vocab_size": 321}, {"attention", "ffn", "pages"}),
        (3, {"num_key_value_heads": 2}, {"ffn"}),
        (1, {"num_key_value_heads": 1}, set()),
    ],
)
def test_what_the_devices_divide_is_cut_and_all_else_is_whole(devices, changes, cut):
    config = ModelConfig.from_hf(tiny.config("qwen3", **SHAPE | changes))
    mesh = mesh_of(jax.devices()[:devices])
    model = FunctionalModel(config, FLOAT32, mesh=mesh)
    wanted, layer = model.checkpoint_structs(), "model.layers.0"
    of = {
        "attention": [f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"],
        "ffn": [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")],
        "vocab": ["model.embed_tokens.weight", "lm_head.weight"],
    }
    structs = {part: [wanted[name] for name in names] for part, names in of.items()}
    if model.rules.kv_copies > 1:  # all devices load k and v, and keep a part of the copies
        assert all(wanted[name].sharding.is_fully_replicated for name in of["attention"][1:3])
        structs["attention"] = [
            struct
            for name, struct in zip(model._flat, model.parameter_structs(), strict=True)
            if name in of["attention"]
        ]
    structs["pages"] = jax.tree.leaves(model.page_struct(2, 128))
    for part, struct in structs.items():
        shares = {np.prod(s.shape) / np.prod(s.sharding.shard_shape(s.shape)) for s in struct}
        assert shares == {devices if part in cut else 1}, part
    norm = wanted["model.norm.weight"]
    assert norm.sharding.is_fully_replicated


@pytest.mark.parametrize("data", [1, 2])
def test_devices_that_divide_nothing_of_a_model_are_refused(data):
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 51}
    config = ModelConfig.from_hf(tiny.config("llama", **odd | {"vocab_size": 321}))
    with pytest.raises(InputError, match="2 devices divide nothing of a model with 3 key/value h"):
        FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[: 2 * data], data))


def test_devices_that_share_a_head_have_its_rows_in_order():
    config = ModelConfig.from_hf(tiny.config("qwen2", **SHAPE | {"num_key_value_heads": 2}))
    model = FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[:8], 2))
    rows = 2 * config.head_dim
    for name, shape in (("weight", (rows, config.hidden_size)), ("bias", (rows,))):
        name = f"model.layers.0.self_attn.k_proj.{name}"
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        (made,) = model.prepare(name, jax.numpy.asarray(array)).values()
        first, second = np.split(array, 2)
        np.testing.assert_array_equal(made, np.concatenate([first, first, second, second]))
        assert made.sharding.shard_shape(made.shape)[0] == config.head_dim
    pages = model.page_struct(4, 128)
    assert pages.sharding.shard_shape(pages.shape)[:2] == (2 * config.num_layers, 1)


def test_slots_are_cut_by_groups_and_weights_are_not():
    config = ModelConfig.from_hf(tiny.config("llama", **SHAPE))
    model = FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[:2], 2))
    assert all(s.sharding.is_fully_replicated for s in model.parameter_structs())
    branches = model.branch_struct(4, 3, 8)
    assert branches.sharding.shard_shape(branches.shape)[1] == 2
