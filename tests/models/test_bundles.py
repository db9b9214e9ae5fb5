"""Tensors of a layer share arrays, and the model is the same."""

import json
from collections import Counter

import jax
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.devices.opening.sizes import bytes_per_device
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.models import functional
from ssd_jax.models.bundles import Bundles
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.models.stacks import Stacks
from ssd_jax.system.huge_pages import HugePages
from ssd_jax.testing import tiny
from tests.models.golden import Runner, parameters
from tests.models.golden_logits import GOLDENS, NAMES, golden
from tests.selection import cases


def config_of(name):
    return ModelConfig.from_hf(json.loads((GOLDENS / name / "config.json").read_text()))


packs = pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
SOME = ("llama-linear", "llama-plain", "llama3-scaled", "qwen2", "qwen3", "nemotron", "olmo2")
DENSE = [name for name in NAMES if config_of(name).mechanisms.experts is None]
KINDS = [pytest.param("bundle_bytes", marks=packs), "bundle_rows"]


def packed_model(name, dtype="bfloat16", kind="bundle_bytes"):
    """A model whose layers lie in bytes, or in rows as on a GPU."""
    checkpoint = open_checkpoint(str(GOLDENS / name))
    execution = Execution.for_platform("cpu", dtype, linear="cpu")
    if kind == "bundle_rows":
        execution = Execution.for_platform("gpu", dtype)
    return checkpoint, FunctionalModel(checkpoint.config, execution)


@pytest.mark.more
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", cases(NAMES, "qwen3"))
def test_logits_are_those_of_weights_in_arrays_of_their_own(monkeypatch, name, dtype, kind):
    tokens, _ = golden(name)

    def logits(model):
        return Runner(model, parameters(checkpoint, model), slots=2)(tokens)

    checkpoint, model = packed_model(name, dtype, kind)
    together = logits(model)
    monkeypatch.setattr(functional.bundles, kind, lambda *_, **__: Bundles({}, {}))
    _, apart = packed_model(name, dtype, kind)
    assert len(apart.parameter_structs()) > len(model.parameter_structs())
    np.testing.assert_array_equal(logits(apart), together)


@packs
@pytest.mark.parametrize("name", cases(NAMES, *SOME))
def test_a_layer_has_one_array_for_all_products(name):
    checkpoint, model = packed_model(name)
    layers = checkpoint.config.num_layers
    assert len(model.bundles.arrays) == layers
    m = checkpoint.config.mechanisms
    norms_in_products = 0 if m.layer_norm or m.norm_placement == "post" else 2
    dense = 6 + m.gated + norms_in_products
    # The norm before experts is apart, since the router reads what it gives, too.
    of_experts = dense - 1 + (3 if m.experts is not None and m.experts.shared else 0)
    counts = Counter(bundle for bundle, _ in model.bundles.locations.values())
    for layer in range(layers):
        assert counts[f"model.layers.{layer}"] == (of_experts if m.has_experts(layer) else dense)
    found = parameters(checkpoint, model)
    for array, struct in zip(found, model.parameter_structs(), strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
    for array in found[:layers]:
        assert array.unsafe_buffer_pointer() % 64 == 0


def test_on_a_gpu_experts_have_arrays_of_their_own():
    """Products that choose an expert in an array of several tensors would copy it."""
    _, model = packed_model("mixtral", "bfloat16", "bundle_rows")
    assert not any(".experts." in name for name in model.bundles.locations)
    assert any(name.endswith("q_proj.weight") for name in model.bundles.locations)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", cases(DENSE, *SOME))
def test_on_a_gpu_a_layer_has_an_array_for_each_type_and_width(name, dtype):
    checkpoint, model = packed_model(name, dtype, "bundle_rows")
    c = checkpoint.config
    widths = {c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim}
    vectors = 1 + c.mechanisms.head_qk_norm  # norms, biases and scales; norms of heads
    assert len(model.bundles.arrays) == (len(widths) + vectors) * c.num_layers
    of_no_layer = [name for name in model.checkpoint_structs() if ".layers." not in name]
    scales = len(model.parameter_structs()) - len(model.bundles.arrays) - len(of_no_layer)
    assert scales == (dtype == "int8")
    found = parameters(checkpoint, model)
    for array, struct in zip(found, model.parameter_structs(), strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)


@pytest.mark.parametrize(("heads", "arrays"), [(2, 4), (1, 4), (3, 5)])
def test_devices_that_share_a_model_have_equal_parts_of_each_tensor(heads, arrays):
    """Of two, each has a part of queries, keys, values and channels; three heads it has whole."""
    queries = 8 if heads < 3 else 9
    settings = {"num_attention_heads": queries, "num_key_value_heads": heads, "head_dim": 4}
    config = ModelConfig.from_hf(tiny.config("llama", intermediate_size=96, **settings))
    mesh = mesh_of(jax.devices()[:2])
    model = FunctionalModel(config, Execution.for_platform("gpu", "bfloat16"), mesh=mesh)
    assert len(model.bundles.arrays) == arrays * config.num_layers
    unsharded = FunctionalModel(config, Execution.for_platform("gpu", "bfloat16"))
    assert bytes_per_device(model.parameter_structs()) < bytes_per_device(
        unsharded.parameter_structs()
    )
    for name, bundle in model.bundles.arrays.items():
        shard = model.bundle_structs()[name].sharding.shard_shape(bundle.struct.shape)
        assert bundle.devices == 1 or shard[0] == 1


@packs
def test_programs_read_bundles_where_they_were_filled():
    """A copy would be all weights again."""
    _, model = packed_model(NAMES[0])
    stacks = Stacks(model, HugePages())
    assert [array.unsafe_buffer_pointer() for array in stacks.arrays().values()] == [
        room.ctypes.data for room in stacks._buffers.values()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_in_the_place_of_another_is_seen(kind):
    """What the first test is for: two norms of a layer change places."""
    name = NAMES[0]
    tokens, _ = golden(name)
    checkpoint, model = packed_model(name, kind=kind)
    want = Runner(model, parameters(checkpoint, model), slots=2)(tokens)
    pieces = model.bundles.locations
    one, other = [piece for piece in pieces if piece.endswith("layernorm.weight")][:2]
    pieces[one], pieces[other] = pieces[other], pieces[one]
    loaded = parameters(checkpoint, model)
    _, model = packed_model(name, kind=kind)
    assert (Runner(model, loaded, slots=2)(tokens) != want).any()


@packs
def test_an_embedding_that_is_looked_up_in_is_not_read_however_it_is_stored():
    config = ModelConfig.from_hf(
        tiny.config("llama", hidden_size=256, intermediate_size=256, tie_word_embeddings=False)
    )
    execution = Execution.for_platform("cpu", "bfloat16", linear="cpu")
    models = [
        FunctionalModel(config, execution, stored=stored)
        for stored in ({}, {"model.embed_tokens.weight": "Q4_1"})
    ]
    arrays = [
        sum(struct.size * struct.dtype.itemsize for struct in model.parameter_structs())
        for model in models
    ]
    read = [bytes_per_device(model.read_structs()) for model in models]
    assert arrays[0] > arrays[1] > read[0] == read[1]
