from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.checkpoints.weights.load import load_arrays
from ssd_jax.checkpoints.weights.tensors import bounds
from ssd_jax.errors import InputError


class Recording:
    """A `TensorSource` over a dictionary that writes down what is read."""

    def __init__(self, arrays: dict[str, np.ndarray], *, seconds: float = 0.0) -> None:
        self.arrays = arrays
        self.shapes = {name: array.shape for name, array in arrays.items()}
        self.seconds = seconds
        self.reads: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        self.most_elements = 0
        self._elements = 0
        self._lock = threading.Lock()

    def shape(self, name):
        return self.arrays[name].shape

    def read(self, name, index=None):
        array = self.arrays[name]
        part = bounds(index, array.shape)
        with self._lock:
            self.reads.append((name, tuple((axis.start, axis.stop) for axis in part)))
            self._elements += array.size
            self.most_elements = max(self.most_elements, self._elements)
        time.sleep(self.seconds)
        with self._lock:
            self._elements -= array.size
        return array[part]


def arrays_of(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"t{i}": rng.normal(size=s).astype(np.float32) for i, s in enumerate(shapes)}


def struct(array: np.ndarray, dtype="float32", sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, jnp.dtype(dtype), sharding=sharding)


def test_arrays_are_cast_on_the_host_and_land_on_the_default_device():
    source = Recording(arrays_of((6, 4), (5,)))
    wanted = {
        "t0": struct(source.arrays["t0"], "bfloat16"),
        "t1": struct(source.arrays["t1"], "float32"),
    }
    loaded = load_arrays(source, wanted, where="here")
    assert loaded.keys() == wanted.keys()
    expected = source.arrays["t0"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(loaded["t0"]), expected)
    np.testing.assert_array_equal(np.asarray(loaded["t1"]), source.arrays["t1"])
    assert loaded["t0"].dtype == jnp.bfloat16
    assert loaded["t0"].devices() == {jax.devices()[0]}


def test_tensors_that_are_not_wanted_are_not_read():
    source = Recording(arrays_of((2, 2), (3, 3)))
    load_arrays(source, {"t1": struct(source.arrays["t1"])}, where="here")
    assert source.reads == [("t1", ((0, 3), (0, 3)))]


def test_a_missing_tensor_is_named_with_its_shape_before_anything_is_read():
    source = Recording(arrays_of((2, 2)))
    wanted = {
        "t0": struct(source.arrays["t0"]),
        "lm_head.weight": jax.ShapeDtypeStruct((7, 3), jnp.float32),
        "other": jax.ShapeDtypeStruct((7, 3), jnp.float32),
    }
    with pytest.raises(InputError, match=r"here: .*'lm_head.weight' \(and 1 more\).*\(7, 3\)"):
        load_arrays(source, wanted, where="here")
    assert source.reads == []


def test_a_misshapen_tensor_is_named_with_both_shapes_before_anything_is_read():
    source = Recording(arrays_of((2, 2), (4, 6)))
    wanted = {
        "t0": struct(source.arrays["t0"]),
        "t1": jax.ShapeDtypeStruct((6, 4), jnp.float32),
    }
    with pytest.raises(InputError, match=r"here: .*'t1' has shape \(4, 6\), expected \(6, 4\)"):
        load_arrays(source, wanted, where="here")
    assert source.reads == []


def test_progress_grows_to_the_total_in_bytes_of_the_result():
    source = Recording(arrays_of((6, 4), (5,), (8, 8)))
    wanted = {name: struct(array, "bfloat16") for name, array in source.arrays.items()}
    calls = []
    load_arrays(source, wanted, where="here", progress=lambda *call: calls.append(call))
    total = 2 * (24 + 5 + 64)
    assert {of for _, of in calls} == {total}
    done = [so_far for so_far, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == total


def test_tensors_in_flight_together_are_no_larger_than_the_largest():
    source = Recording(arrays_of((100,), (90,), (50,), (50,), (20,), (20,)), seconds=0.01)
    wanted = {name: struct(array) for name, array in source.arrays.items()}
    load_arrays(source, wanted, where="here")
    assert source.most_elements == 100  # 50 + 50 side by side, 100 + 90 not


def test_an_error_while_reading_is_raised():
    source = Recording(arrays_of((4,), (4,), (4,)))

    def fail(name, index=None):
        raise InputError(f"{name} is damaged")

    source.read = fail
    wanted = {name: struct(array) for name, array in source.arrays.items()}
    with pytest.raises(InputError, match="is damaged"):
        load_arrays(source, wanted, where="here")


def mesh() -> Mesh:
    devices = np.array(jax.devices("cpu"))
    if devices.size < 8:
        pytest.skip("needs 8 virtual CPU devices (tests/conftest.py sets XLA_FLAGS)")
    return Mesh(devices[:8].reshape(2, 4), ("data", "model"))


@pytest.mark.parametrize(
    ("spec", "slices"),
    [
        (PartitionSpec("model", None), {((4 * i, 4 * i + 4), (0, 8)) for i in range(4)}),
        (PartitionSpec(None, "model"), {((0, 16), (2 * i, 2 * i + 2)) for i in range(4)}),
        (
            PartitionSpec("data", "model"),
            {((8 * i, 8 * i + 8), (2 * j, 2 * j + 2)) for i in range(2) for j in range(4)},
        ),
        (PartitionSpec(), {((0, 16), (0, 8))}),
    ],
)
def test_a_sharded_array_is_read_by_its_slices_each_once(spec, slices):
    source = Recording(arrays_of((16, 8)))
    sharding = NamedSharding(mesh(), spec)
    wanted = {"t0": struct(source.arrays["t0"], "bfloat16", sharding)}
    loaded = load_arrays(source, wanted, where="here")["t0"]
    assert loaded.sharding == sharding
    expected = source.arrays["t0"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(loaded), expected)
    assert len(source.reads) == len(slices)
    assert {part for _, part in source.reads} == slices


def test_bounds_fill_up_missing_axes_and_refuse_steps():
    assert bounds(None, (3, 4)) == (slice(0, 3), slice(0, 4))
    assert bounds((slice(1, 9),), (3, 4)) == (slice(1, 3), slice(0, 4))
    with pytest.raises(ValueError, match="step"):
        bounds((slice(0, 3, 2),), (3, 4))
    with pytest.raises(ValueError, match="2 slices"):
        bounds((slice(1), slice(1)), (3,))
