"""What checks, while tests run, that arrays have the shapes and types that signatures say.

A name of a dimension has one size in all arguments and the result of a call, the fields of named
tuples among its arguments included. As everywhere in JAX, arrays of NumPy are taken for its own.

`jaxtyping` has an import hook, too. That one decorates functions within functions as well, at every
call of the outer one, which doubles what the checks cost.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Annotated, Any

import beartype
import jaxtyping
import numpy as np
from beartype.door import is_bearable
from beartype.vale import Is

PACKAGES = (
    "ssd_jax.kernels",
    "ssd_jax.models",
    "ssd_jax.sampling",
    "ssd_jax.speculation.cache",
    "ssd_jax.speculation.division",
    *(
        f"ssd_jax.devices.{module}"  # in `expansion_steps` a call has rows of two kinds
        for module in (
            "branches.branching",
            "branches.draft",
            "draft.programs",
            "draft.record",
            "paged_role",
            "programs.packing",
            "programs.passes",
            "target.target",
        )
    ),
)
_CONF = beartype.BeartypeConf(is_pep484_tower=True)  # an int is a float


def install() -> None:
    """Has the functions and methods of these packages checked; call it before they are imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if not any(f"{fullname}.".startswith(f"{package}.") for package in PACKAGES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = functools.partial(_run, spec.loader.exec_module)
        return spec


def _run(execute: Callable[[types.ModuleType], None], module: types.ModuleType) -> None:
    execute(module)
    for holder in [module, *filter(inspect.isclass, vars(module).values())]:
        for name, value in list(vars(holder).items()):
            defined_here = inspect.isfunction(value) and value.__module__ == module.__name__
            if defined_here and not hasattr(value, "__wrapped__"):  # it may take more than it wraps
                setattr(holder, name, _checked(value))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises where an array that it takes or gives is not what it says.

    One of `beartype` around the function itself: that of `jaxtyped` checks arguments twice.
    """
    hints = {name: _evaluated(hint, function) for name, hint in function.__annotations__.items()}
    hints = {name: hint for name, hint in hints.items() if _tells_shapes(hint)}
    if not hints:
        return function
    for name in hints.keys() - {"return"}:  # of a result, a named tuple may have other rows
        hints[name] = _of_argument(hints[name])
    function.__annotations__ = hints
    return jaxtyping.jaxtyped(beartype.beartype(conf=_CONF)(function), typechecker=None)


def _evaluated(hint: Any, function: Callable[..., Any]) -> Any:
    try:
        return eval(hint, function.__globals__) if isinstance(hint, str) else hint
    except NameError:  # what only type checkers import
        return Any


def _tells_shapes(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, jaxtyping.AbstractArray) or hasattr(hint, "_fields")
    return any(map(_tells_shapes, typing.get_args(hint)))


def _of_argument(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, map(_of_argument, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return tuple[tuple(map(_of_argument, typing.get_args(hint)))]
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint | hint.dtype[np.ndarray, hint.dim_str]
    if isinstance(hint, type) and hasattr(hint, "_fields"):
        return Annotated[hint, Is[_fields_fit]]
    return hint


def _fields_fit(value: Any) -> bool:
    hints = _hints(type(value))
    return all(is_bearable(getattr(value, name), hint) for name, hint in hints.items())


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    of_handles = {name for name, hint in hints.items() if getattr(hint, "_is_protocol", False)}
    return {name: _of_argument(hint) for name, hint in hints.items() if name not in of_handles}
