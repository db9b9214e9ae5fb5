"""Embeddings whose rows fill whole tiles, as on TPUs: the same model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.kernels.linear import api, tiles
from ssd_jax.kernels.linear.blocks import BLOCK
from ssd_jax.kernels.linear.quantized import quantize
from ssd_jax.models import tensor_loading
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.models.golden import Runner, parameters
from tests.selection import cases

TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 9)).astype(np.int32)
NAME = "model.embed_tokens.weight"
FAMILIES = {"llama": "tied", "qwen3": "with a head of its own"}


@pytest.mark.parametrize("of", [lambda weight: weight, quantize], ids=["bfloat16", "int8"])
def test_products_and_rows_are_those_of_the_plain_weight(of):
    """Of small integers, whose sums are exact in any order."""
    rng = np.random.default_rng(1)
    plain = jnp.asarray(rng.integers(-8, 8, (24, 200)), "bfloat16")
    wide = tiles.to_tiles(plain)
    assert wide.shape == (24, 256)
    x = jnp.asarray(rng.integers(-8, 8, (5, 200)), jnp.float32)
    (want,), (got,) = (api.products(x, [of(weight)]) for weight in (plain, wide))
    np.testing.assert_array_equal(got, want)
    rows = jnp.asarray([23, 0, 7], jnp.int32)
    found = np.asarray(api.take(of(wide), rows))
    np.testing.assert_array_equal(found[:, :200], api.take(of(plain), rows))
    assert not found[:, 200:].any()


def models_of(path, dtype, devices):
    """A checkpoint's model as on TPUs, but for attention, and the same in rows as they are."""
    checkpoint = open_checkpoint(str(path))
    mesh = mesh_of(jax.devices()[:devices]) if devices > 1 else None
    wide = Execution.for_platform("tpu", dtype, attention="xla_static")
    assert wide.whole_tiles
    for execution in (wide, dataclasses.replace(wide, whole_tiles=False)):
        model = FunctionalModel(checkpoint.config, execution, mesh=mesh)
        yield model, parameters(checkpoint, model)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16", "int8"], "float32", "int8"))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_rows_as_checkpoints_have_them(tmp_path, family, dtype, devices):
    path = tiny.write_checkpoint(tmp_path, family)
    (wide, of_wide), (plain, of_plain) = models_of(path, dtype, devices)
    shapes = [model._parameters[NAME].shape[1] for model in (wide, plain)]
    assert shapes == [BLOCK, 32]
    got, want = (Runner(*each, slots=2)(TOKENS) for each in ((wide, of_wide), (plain, of_plain)))
    np.testing.assert_allclose(got, want, atol=(1e-4 if dtype == "float32" else 0.02) * want.std())


@pytest.mark.parametrize("family", FAMILIES)
def test_zeros_before_a_row_are_caught(tmp_path, family, monkeypatch):
    path = tiny.write_checkpoint(tmp_path, family)

    def before(weight):
        return jnp.pad(weight, ((0, 0), (tiles.whole(weight.shape[1]) - weight.shape[1], 0)))

    monkeypatch.setattr(tensor_loading, "to_tiles", before)
    got, want = (Runner(*each, slots=2)(TOKENS) for each in models_of(path, "float32", 1))
    assert np.abs(got - want).max() > want.std()


def test_rows_that_fill_whole_tiles_stay_as_they_are(tmp_path):
    path = tiny.write_checkpoint(tmp_path, hidden_size=BLOCK)
    (wide, _), (plain, _) = models_of(path, "float32", 1)
    assert wide.parameter_structs() == plain.parameter_structs()
