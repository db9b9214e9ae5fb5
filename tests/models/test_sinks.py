"""Sinks: a key without a value which every query of a layer sees."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.models import attention
from ssd_jax.models.config import KEY
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sequence import sequence_hidden, sequence_logits
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from tests.models.golden import FLOAT32, ON_GPUS, ON_TPUS, Runner, our_logits
from tests.sampling.edits import Edit, edited

TOKENS = np.random.default_rng(0).integers(0, tiny.TOKENS, (2, 12)).astype(np.int32)
SWITCHES = {"qkv_bias": False, "qk_norm": False}


def written(directory, *, sinks=True, change=lambda name, values: values):
    """A checkpoint whose tensors are changed."""
    changes = {KEY: SWITCHES | ({"sinks": True} if sinks else {})}
    path = tiny.write_checkpoint(directory, "llama", **changes)
    tensors = tiny.weights(tiny.config("llama", **changes))
    save_file({n: change(n, v) for n, v in tensors.items()}, path / "model.safetensors")
    return path


def logits(directory, **options):
    return our_logits(written(directory, **options), TOKENS)


def test_a_sink_below_all_scores_changes_nothing(tmp_path):
    def lowest(name, values):
        return np.full_like(values, -1e4) if name.endswith("sinks") else values

    def there(name, values):
        return values if name.endswith("sinks") else without[name]

    without = tiny.weights(tiny.config("llama", **{KEY: SWITCHES}))
    drawn = logits(tmp_path / "drawn", change=there)
    plain = logits(tmp_path / "plain", sinks=False)
    none = logits(tmp_path / "none", change=lambda name, v: lowest(name, there(name, v)))
    np.testing.assert_allclose(none, plain, atol=1e-5)
    assert np.abs(drawn - plain).max() > 0.1


def test_a_sink_above_all_scores_takes_all_weight(tmp_path):
    def highest(name, values):
        return np.full_like(values, 1e4) if name.endswith("sinks") else values

    def nothing(name, values):
        return np.zeros_like(values) if name.endswith("o_proj.weight") else values

    all_weight = logits(tmp_path / "all", change=highest)
    np.testing.assert_allclose(all_weight, logits(tmp_path / "no", change=nothing), atol=1e-5)


@pytest.mark.parametrize("devices", [1, 4])  # of four, two have the same key/value head
@pytest.mark.parametrize(
    "changes", [ON_TPUS, ON_GPUS, {"attention": "reference"}], ids=["tpu", "gpu", "reference"]
)
def test_logits_are_the_same_in_every_way_to_run_them(tmp_path, changes, devices):
    path = written(tmp_path)
    checkpoint = open_checkpoint(str(path))
    mesh = mesh_of(jax.devices()[:devices]) if devices > 1 else None
    execution = dataclasses.replace(FLOAT32, **changes)
    model = FunctionalModel(checkpoint.config, execution, mesh=mesh)
    parameters = load_parameters(checkpoint.tensors, model, where="here")
    got = Runner(model, parameters, slots=len(TOKENS))(TOKENS)
    np.testing.assert_allclose(got, our_logits(path, TOKENS), atol=1e-4)


def of_whole_sequences(path):
    checkpoint = open_checkpoint(str(path))
    model = FunctionalModel(checkpoint.config, FLOAT32)
    parameters = load_parameters(checkpoint.tensors, model, where="here")
    module, shape = model.module(parameters), TOKENS.shape
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    hidden = sequence_hidden(module, TOKENS, positions, np.ones(shape, np.int32))
    return np.asarray(sequence_logits(module, hidden.reshape(TOKENS.size, -1))).reshape(*shape, -1)


def of_half_the_heads(path):
    """Logits of a model of which each of two devices has half of the heads."""
    checkpoint = open_checkpoint(str(path))
    model = FunctionalModel(checkpoint.config, FLOAT32, mesh=mesh_of(jax.devices()[:2]))
    parameters = load_parameters(checkpoint.tensors, model, where="here")
    return Runner(model, parameters, slots=len(TOKENS))(TOKENS)


MUTANTS = {
    "a sink ignored": ("if self.sinks is None:", "if True:", our_logits),
    "a sink ignored in whole sequences": ("if self.sinks is None:", "if True:", None),
    "sinks of other heads": ("self.sinks[...]", "self.sinks[...][::-1]", our_logits),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(tmp_path, name):
    old, new, run = MUTANTS[name]
    path = written(tmp_path)
    run = of_whole_sequences if run is None else functools.partial(run, tokens=TOKENS)
    expected = of_half_the_heads(path)
    np.testing.assert_allclose(run(path), expected, atol=1e-4)
    jax.clear_caches()
    with edited([Edit(attention.Attention, "with_sinks", old, new)]):
        assert np.abs(run(path) - expected).max() > 0.1
    jax.clear_caches()
