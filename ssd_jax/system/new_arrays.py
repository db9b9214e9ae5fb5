"""New arrays on devices, made by programs of the store in use if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ssd_jax.system.compile_cache import store_in_use
from ssd_jax.system.stored_jit import StoredJit

T = TypeVar("T")


def create_arrays(make: Callable[[], T]) -> T:
    """Arrays that a function makes on the default device, by one program if there is a store."""
    return make() if store_in_use() is None else StoredJit(make)()


def zeros(structs: Any) -> Any:
    """Zero-filled arrays of these structs."""
    return filled(structs, jax.tree.map(lambda _: 0, structs))


def filled(structs: Any, values: Any) -> Any:
    """Arrays of these structs, each filled with its value; by one program if there is a store."""

    def fill(struct: jax.ShapeDtypeStruct, value: float, device: Sharding | None = None):
        return jnp.full(struct.shape, value, struct.dtype, device=device)

    shardings = jax.tree.map(lambda struct: struct.sharding, structs)
    if store_in_use() is None:
        return jax.tree.map(lambda s, value: fill(s, value, s.sharding), structs, values)
    return StoredJit(lambda: jax.tree.map(fill, structs, values), out_shardings=shardings)()
