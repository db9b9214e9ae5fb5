"""What checks, while tests run, that arrays have the shapes and types that signatures say.

It is given to `jaxtyping`'s import hook by `tests/conftest.py`. A name of a dimension has one size
in all arguments and the result of a call, the fields of named tuples among its arguments included.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import beartype
from beartype.door import is_bearable
from beartype.vale import Is

PACKAGES = (
    "ssd_jax.kernels",
    "ssd_jax.models",
    "ssd_jax.sampling",
    "ssd_jax.devices.record",
)
_CONF = beartype.BeartypeConf(is_pep484_tower=True)  # an int is a float


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which raises where an argument or its result is not what its signature says."""
    if "<locals>" in function.__qualname__:  # would be made anew at every call of what it is in
        return function
    for name, hint in function.__annotations__.items():
        if name != "return":  # whose rows may be others
            function.__annotations__[name] = _with_fields(hint)
    return beartype.beartype(conf=_CONF)(function)


def _with_fields(hint: Any) -> Any:
    if not (isinstance(hint, type) and hasattr(hint, "_fields")):
        return hint
    return Annotated[hint, Is[_fields_fit]]


def _fields_fit(value: Any) -> bool:
    return all(
        is_bearable(getattr(value, name), hint) for name, hint in _hints(type(value)).items()
    )


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _with_fields(hint) for name, hint in hints.items()}
