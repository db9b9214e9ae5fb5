"""Programs by what they compute: those that differ in anything are apart, and all give what
`jax.jit` gives."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ssd_jax.system import stored_jit
from ssd_jax.system.compile_cache import ProgramStore, use_store
from ssd_jax.system.new_arrays import create_arrays
from ssd_jax.system.stored_jit import StoredJit


class Pair(NamedTuple):
    a: jax.Array
    b: jax.Array


class Twin(NamedTuple):
    a: jax.Array
    b: jax.Array


@pytest.fixture(autouse=True)
def store(tmp_path, no_cache_of_the_user):
    store = ProgramStore(tmp_path)
    use_store(store)
    return store


def stored(store) -> int:
    return len(list(store.directory.glob("*.program")))


def same(found, expected) -> bool:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(
        (x.dtype, x.weak_type, x.sharding, x.committed)
        == (y.dtype, y.weak_type, y.sharding, y.committed)
        and np.array_equal(x, y)
        for x, y in pairs
    )


def twins():
    """Functions that differ only in what XLA's program does not say."""
    return {
        "the first argument": lambda x, y: x + 1,
        "the second argument": lambda x, y: y + 1,
        "a tuple": lambda x, y: (x + 1,),
        "a weak type": lambda x, y: jax.lax.full((), 1.0),
        "no weak type": lambda x, y: jnp.float32(1.0),
        "a pair": lambda x, y: Pair(x, y),
        "a pair the other way": lambda x, y: Pair(y, x),
        "another pair": lambda x, y: Twin(x, y),
        "a dict": lambda x, y: {"a": x, "b": y},
        "constants": lambda x, y: x + np.arange(3, dtype=np.float32),
        "other constants": lambda x, y: x + np.arange(3, dtype=np.float32)[::-1],
    }


def test_functions_that_differ_in_anything_have_programs_of_their_own(store):
    x, y = jnp.zeros(3), jnp.ones(3)
    for _ in "first", "again":
        for what, function in twins().items():
            function.__name__ = "f"
            assert same(StoredJit(function)(x, y), jax.jit(function)(x, y)), what
        assert stored(store) == len(twins())


def never_compiled(monkeypatch):
    monkeypatch.setattr(stored_jit, "_store", lambda *_: pytest.fail("it is compiled"))


def test_the_next_start_compiles_nothing(store, monkeypatch):
    def function(x):
        return {"y": x * 2}

    first = StoredJit(function)(jnp.ones(3))
    never_compiled(monkeypatch)
    assert same(StoredJit(function)(jnp.ones(3)), first)


@pytest.mark.parametrize(
    "arguments",
    [
        (np.ones(4, np.float32),),
        (jnp.ones((4, 1)),),
        (jnp.ones(4, jnp.int32),),
        (2.0,),
        (jax.device_put(np.ones(4, np.float32), jax.devices()[1]),),
    ],
)
def test_each_kind_of_argument_has_its_program(arguments):
    function = StoredJit(lambda x: x + 1)
    assert same(function(jnp.ones(4)), jax.jit(lambda x: x + 1)(jnp.ones(4)))
    for _ in "first", "in memory":
        assert same(function(*arguments), jax.jit(lambda x: x + 1)(*arguments))


def test_arguments_by_name_are_static(store):
    function = StoredJit(jnp.repeat, static=("repeats", "axis"))
    for repeats in (2, 3, 2):
        found = function(jnp.arange(3), repeats=repeats, axis=0)
        assert found.tolist() == np.repeat(np.arange(3), repeats).tolist()
    assert stored(store) == 2


def test_over_a_mesh_and_with_donated_arguments_too(store, monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[1:3])
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    for _ in "first", "again":
        x = jax.device_put(np.arange(4.0), sharding)
        found = StoredJit(lambda x, y: x + y, donate=(0,), out_shardings=sharding)(x, 1)
        assert found.tolist() == [1, 2, 3, 4]
        assert found.sharding == sharding
        assert x.is_deleted()
        assert stored(store) == 1
        never_compiled(monkeypatch)


def test_arrays_that_a_function_makes_are_one_program(store):
    def make():
        return {"a": jnp.zeros(3), "b": jnp.full((2, 2), -1)}

    assert same(create_arrays(make), make())
    assert stored(store) == 1
    use_store(None)
    assert same(create_arrays(make), make())
    assert stored(store) == 1
