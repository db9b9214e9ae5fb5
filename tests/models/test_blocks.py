"""Weights in blocks of inputs, as on TPU7x: the same model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.kernels.linear import api, blocks
from ssd_jax.models import tensor_loading
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.models.golden import Runner, parameters
from tests.selection import cases

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 9)).astype(np.int32)
PRODUCTS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def product_at_once(weight):
    """A weight in blocks as [outputs, inputs]."""
    return np.concatenate(list(np.asarray(weight)), axis=1)


def test_blocks_follow_each_other_along_the_inputs():
    weight = np.arange(3 * 256).reshape(3, 256)
    found = blocks.to_blocks(jnp.asarray(weight))
    assert found.shape == (2, 3, 128)
    np.testing.assert_array_equal(product_at_once(found), weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_rows_are_those_of_the_plain_weight(dtype):
    """Of small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(1)
    plain = jnp.asarray(rng.integers(-8, 8, (24, 384)), dtype)
    blocked = blocks.to_blocks(plain)
    x = jnp.asarray(rng.integers(-8, 8, (5, 384)), jnp.float32)
    (want,), (got,) = (api.products(x, [weight]) for weight in (plain, blocked))
    np.testing.assert_array_equal(got, want)
    rows = jnp.asarray([23, 0, 7], jnp.int32)
    np.testing.assert_array_equal(api.take(blocked, rows), api.take(plain, rows))


def models_of(path, dtype, devices):
    """A checkpoint's model as on TPU7x, but for attention, and the same without blocks."""
    checkpoint = open_checkpoint(str(path))
    mesh = mesh_of(jax.devices()[:devices]) if devices > 1 else None
    blocked = Execution.for_platform("tpu", dtype, attention="xla_static", blocks=True)
    for execution in (blocked, dataclasses.replace(blocked, blocks=False)):
        model = FunctionalModel(checkpoint.config, execution, mesh=mesh)
        yield model, parameters(checkpoint, model)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("family", cases(["llama", "qwen2", "qwen3"], "llama"))
def test_logits_are_those_of_weights_as_checkpoints_have_them(tmp_path, family, dtype, devices):
    path = tiny.write_checkpoint(tmp_path, family, **SIZES)
    got, want = (Runner(*model, slots=2)(TOKENS) for model in models_of(path, dtype, devices))
    np.testing.assert_allclose(got, want, atol=(1e-4 if dtype == "float32" else 0.02) * want.std())


def test_a_wrong_order_of_blocks_is_caught(tmp_path, monkeypatch):
    path = tiny.write_checkpoint(tmp_path, **SIZES)

    def without_swap(weight):
        return weight.reshape(-1, weight.shape[0], blocks.BLOCK)

    monkeypatch.setattr(tensor_loading, "to_blocks", without_swap)
    got, want = (Runner(*model, slots=2)(TOKENS) for model in models_of(path, "float32", 1))
    assert np.abs(got - want).max() > want.std()


@pytest.mark.parametrize(
    ("devices", "apart"), [(1, set()), (2, {"down_proj"}), (4, {"down_proj", "o_proj"})]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_of_products_lie_in_blocks_where_each_device_has_whole_ones(
    tmp_path, family, devices, apart
):
    """Three blocks of channels are not cut in two, nor two of heads in four."""
    path = tiny.write_checkpoint(tmp_path, family, **SIZES)
    model, found = next(models_of(path, "bfloat16", devices))
    head = {"embed_tokens"} if family == "llama" else {"lm_head"}
    blocked = set()
    for name, array in zip(model._parameters, found, strict=True):
        struct = model._parameters[name]
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
        assert struct.sharding is None or array.sharding.is_equivalent_to(
            struct.sharding, array.ndim
        )
        *_, layer, kind = name.split(".")
        if kind == "weight" and array.ndim - ("layers" in name) == 3:
            assert array.addressable_shards[0].data.shape[-1] == blocks.BLOCK
            blocked.add(layer)
    assert blocked == (PRODUCTS | head) - apart


def test_weights_of_int8_stay_as_they_are(tmp_path):
    path = tiny.write_checkpoint(tmp_path, **SIZES)
    (blocked, _), (plain, _) = models_of(path, "int8", 1)
    assert blocked.parameter_structs() == plain.parameter_structs()
