"""Edits of the source of functions, made for the length of a `with`."""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from unittest import mock


@dataclass(frozen=True)
class Edit:
    """New text for old in the source of a function of a module, or of a method of a class."""

    module: ModuleType | type
    function: str
    old: str
    new: str


@contextlib.contextmanager
def edited(edits: Sequence[Edit]) -> Iterator[None]:
    """Replaces the functions by edited ones in every module of the package that names them."""
    with contextlib.ExitStack() as stack:
        for (module, name), changes in _by_function(edits).items():
            original = getattr(module, name)
            source = textwrap.dedent(inspect.getsource(original))
            for edit in changes:
                if source.count(edit.old) != 1:
                    raise ValueError(f"{name}: {edit.old!r} is not there exactly once")
                source = source.replace(edit.old, edit.new)
            made: dict = {}
            where = module if isinstance(module, ModuleType) else sys.modules[module.__module__]
            exec(compile(source, f"<edited {name}>", "exec"), vars(where), made)
            if module is not where:
                stack.enter_context(mock.patch.object(module, name, made[name]))
                continue
            for other in list(sys.modules.values()):
                if other.__name__.startswith("ssd_jax."):
                    for attribute, value in list(vars(other).items()):
                        if value is original:
                            stack.enter_context(mock.patch.object(other, attribute, made[name]))
        yield


def _by_function(edits: Sequence[Edit]) -> dict[tuple[ModuleType | type, str], list[Edit]]:
    functions: dict[tuple[ModuleType | type, str], list[Edit]] = {}
    for edit in edits:
        functions.setdefault((edit.module, edit.function), []).append(edit)
    return functions
