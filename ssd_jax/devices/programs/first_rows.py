"""Makes the program of the first rows of a batch from that of all rows.

State of all slots stays where it is: the program takes and returns the same arrays, of which it
reads and writes the first rows alone. So callers, and other programs, need not know how many rows a
program has run; only what one program hands to another of its own size has its rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ssd_jax.devices.programs.program_spec import ProgramSpec


def over_first_rows(
    of_all: ProgramSpec,
    of_first: ProgramSpec,
    *,
    passed: Collection[str] = (),
    rest: Mapping[str, Callable[[Any], Any]] | None = None,
) -> ProgramSpec:
    """The specification of `of_first` for the arguments of `of_all`.

    Results that replace an argument keep its other rows; others have zeros there.

    Args:
      of_all, of_first: one program of all rows, and of the first ones; of a mesh, of each group.
      passed: names of arguments and results that have no other rows.
      rest: other rows, by name of the result: from the argument that it replaces, or from zeros.
    """
    rest = rest or {}
    names = list(inspect.signature(of_all.function).parameters)[: len(of_all.arguments)]
    structs = list(zip(names, of_all.arguments, of_first.arguments, strict=True))
    arguments = tuple(few if name in passed else every for name, every, few in structs)
    # Results that are sharded by slots have them in front.
    rows = next(
        (every.shape[0], few.shape[0])
        for name, every_tree, few_tree in structs
        if name not in passed
        for every, few in zip(jax.tree.leaves(every_tree), jax.tree.leaves(few_tree), strict=True)
        if every.shape[:1] != few.shape[:1]
    )

    def function(*values: Any) -> Any:
        first = [
            value if name in passed else jax.tree.map(_first, value, every, few)
            for value, (name, every, few) in zip(values, structs, strict=True)
        ]
        by_name = dict(zip(names, values, strict=True))
        results = of_first.function(*first)
        return tuple(
            result
            if name in passed or name not in (*by_name, *rest, "slots", "read")
            else _with_rest(result, by_name.get(name), rest.get(name), rows)
            for name, result in zip(of_all.returns, results, strict=True)
        )

    return of_all._replace(function=function, arguments=arguments)


def _first(value: jax.Array, every: jax.ShapeDtypeStruct, few: jax.ShapeDtypeStruct) -> jax.Array:
    """The first rows of an argument, along the axis in which the two structs differ."""
    for axis, (all_rows, rows) in enumerate(zip(every.shape, few.shape, strict=True)):
        if all_rows != rows:
            count = value.shape[axis] * rows // all_rows
            return jax.lax.slice_in_dim(value, 0, count, axis=axis)
    return value


def _with_rest(
    result: Any, replaced: Any, rest: Callable[[Any], Any] | None, rows: tuple[int, int]
) -> Any:
    """Results of the first rows before those of the others."""
    others = replaced
    if others is None:
        others = jax.tree.map(
            lambda r: jnp.zeros((r.shape[0] * rows[0] // rows[1], *r.shape[1:]), r.dtype), result
        )
    if rest is not None:
        others = rest(others)

    def put(first: jax.Array, every: jax.Array) -> jax.Array:
        if first.shape == every.shape:
            return first
        return jax.lax.dynamic_update_slice(every, first, (0,) * first.ndim)

    return jax.tree.map(put, result, others)
