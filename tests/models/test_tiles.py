"""Embeddings and experts that fill whole tiles, as on TPUs: the same model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.kernels.experts.api import XLA
from ssd_jax.kernels.linear import api, tiles
from ssd_jax.kernels.linear.blocks import BLOCK
from ssd_jax.kernels.linear.quantized import quantize
from ssd_jax.models import tensor_loading
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.models.every_mechanism import EXPERTS
from tests.models.golden import Runner, parameters
from tests.selection import cases

TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 9)).astype(np.int32)
MODELS = {
    "one embedding": ("llama", {}),
    "a head of its own": ("qwen3", {}),
    "experts": ("granite", EXPERTS),
}
LAYERS = "model.layers.2.mlp.experts."
WIDE = {
    "model.embed_tokens.weight": (tiny.ROWS, BLOCK),
    f"{LAYERS}gate_proj.weight": (6, 24, BLOCK),
    f"{LAYERS}up_proj.weight": (6, 24, BLOCK),
    f"{LAYERS}down_proj.weight": (6, BLOCK, 24),
}
"""Shapes of parameters in whole tiles, of those that a model has."""


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
    wide = dataclasses.replace(wide, experts=XLA, scan_layers=False)
    for execution in (wide, dataclasses.replace(wide, whole_tiles=False)):
        model = FunctionalModel(checkpoint.config, execution, mesh=mesh)
        yield model, parameters(checkpoint, model)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16", "int8"], "float32", "int8"))
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_weights_as_checkpoints_have_them(tmp_path, name, dtype, devices):
    family, changes = MODELS[name]
    path = tiny.write_checkpoint(tmp_path, family, **changes)
    (wide, of_wide), (plain, of_plain) = models_of(path, dtype, devices)
    different = {n: s.shape for n, s in wide._parameters.items() if s != plain._parameters[n]}
    wanted = {n: shape for n, shape in WIDE.items() if n in wide._parameters}
    assert {n: shape for n, shape in different.items() if n in WIDE} == wanted
    assert len(wanted) == (4 if name == "experts" else 1)
    got, want = (Runner(*each, slots=2)(TOKENS) for each in ((wide, of_wide), (plain, of_plain)))
    np.testing.assert_allclose(got, want, atol=(1e-4 if dtype == "float32" else 0.02) * want.std())


def before(weight):
    return jnp.pad(weight, ((0, 0), (tiles.whole(weight.shape[1]) - weight.shape[1], 0)))


def above(weight):
    return jnp.pad(weight, ((0, 0), (tiles.whole(weight.shape[1]) - weight.shape[1], 0), (0, 0)))


@pytest.mark.parametrize(
    ("name", "function", "fault"),
    [
        ("one embedding", "to_tiles", before),
        ("a head of its own", "to_tiles", before),
        ("experts", "rows_to_tiles", above),
    ],
)
def test_zeros_before_a_weight_are_caught(tmp_path, name, function, fault, monkeypatch):
    family, changes = MODELS[name]
    path = tiny.write_checkpoint(tmp_path, family, **changes)
    monkeypatch.setattr(tensor_loading, function, fault)
    got, want = (Runner(*each, slots=2)(TOKENS) for each in models_of(path, "float32", 1))
    assert np.abs(got - want).max() > want.std()


def test_rows_that_fill_whole_tiles_stay_as_they_are(tmp_path):
    path = tiny.write_checkpoint(tmp_path, hidden_size=BLOCK)
    (wide, _), (plain, _) = models_of(path, "float32", 1)
    assert wide.parameter_structs() == plain.parameter_structs()
