"""Layers that are scanned are loaded straight into the arrays that hold them all."""

import gc
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.stacks import Stacks
from ssd_jax.system.huge_pages import HugePages
from tests.models.random_weights import LAYERS, Random, made
from tests.selection import cases


def live():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("devices", [0, 2])
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16", "int8"], "int8"))
def test_stacks_hold_the_layers_where_the_programs_want_them(dtype, devices):
    model = made(dtype, devices)
    source = Random(model)
    found = load_parameters(source, model, where="here")
    for array, struct in zip(found, model.parameter_structs(), strict=True):
        assert (array.shape, array.dtype) == (struct.shape, struct.dtype)
        assert struct.sharding is None or array.sharding.is_equivalent_to(struct.sharding, 3)
    counts = Counter(stack for stack, _ in model.bundles.locations.values())
    assert set(counts.values()) == {LAYERS}
    arrays = dict(zip(model._parameters, found, strict=True))
    for layer in (0, 7, LAYERS - 1):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert model.bundles.locations[name] == ("model.layers.mlp.up_proj.weight", layer)
        parts = model.prepare(name, jnp.asarray(source.read(name), model.execution.floating))
        stack = arrays["model.layers.mlp.up_proj.weight"][layer]
        np.testing.assert_array_equal(np.asarray(stack), np.asarray(parts[name]))


def test_a_stack_of_one_layer_is_loaded_from_tensors_as_checkpoints_have_them():
    model = made("float32", 0, layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    assert model.checkpoint_structs()[name].shape == (512, 128)
    found = load_parameters(Random(model), model, where="here")
    stack = dict(zip(model._parameters, found, strict=True))["model.layers.mlp.up_proj.weight"]
    np.testing.assert_array_equal(np.asarray(stack), Random(model).read(name)[None])


@pytest.mark.parametrize("devices", cases([0, 2], 2))
def test_devices_hold_the_weights_and_one_tensor_more(devices, monkeypatch):
    model = made("float32", devices)
    gc.collect()
    source, seen, before = Random(model), [], live()
    assemble = FunctionalModel.assemble

    def watched(self, arrays):
        result = assemble(self, arrays)
        seen.append(live())  # all that was loaded is still there
        return result

    monkeypatch.setattr(FunctionalModel, "assemble", watched)
    load_parameters(source, model, where="here", progress=lambda *_: seen.append(live()))
    weights = sum(struct.size * 4 for struct in model.parameter_structs())
    largest = max(struct.size * 4 for struct in model.checkpoint_structs().values())
    assert 0.8 * weights < max(seen) - before <= weights + 2 * largest < 1.2 * weights


def test_a_stack_stays_where_it_is_while_layers_come():
    model = made("float32", 0)
    stacks, places = Stacks(model, HugePages()), set()
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert stacks.prepare(name, jnp.ones(model.checkpoint_structs()[name].shape)) == {}
        (stack,) = stacks.arrays().values()
        places.add(stack.unsafe_buffer_pointer())
    assert len(places) == 1
