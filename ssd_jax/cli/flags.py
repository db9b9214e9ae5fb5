"""Flags of a command, by absl."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from typing_extensions import override

ONCE = ("prompt", "prompt_file")
"""Flags of which a second value would leave the first unread."""
_ABSL_FLAGS = re.compile("--?(flagfile|undefok)(=.*)?", re.DOTALL)


class _IntegerOrNone(flags.IntegerParser):
    """Reads "none" as None."""

    @override
    def convert(self, argument: int | str) -> Any:
        return None if argument == "none" else super().convert(argument)


_DEFINE = {
    "bool": flags.DEFINE_boolean,
    "int": flags.DEFINE_integer,
    "int or none": functools.partial(flags.DEFINE, _IntegerOrNone()),
    "float": flags.DEFINE_float,
    "str": flags.DEFINE_string,
    "StructuredOutputsParams": flags.DEFINE_string,
    "int | str": flags.DEFINE_string,
    "int | float | str": flags.DEFINE_string,
    "list": flags.DEFINE_list,
    "tuple[str, ...]": flags.DEFINE_multi_string,
    "tuple[int, ...]": flags.DEFINE_multi_integer,
    "tuple[tuple[int, float], ...]": flags.DEFINE_multi_string,
}

FlagSpecs = Mapping[str, str | tuple[str, Any, str] | tuple[str, Any, str, Sequence[str]]]
"""Flags of a command by name: type of the values (see `_DEFINE`), default, help, and perhaps the
possible values; for a text without a default, the help alone."""


class Flags(flags.FlagValues):
    """Flags without absl's own flagfile and undefok.

    Iterating gives all but those of `translated`.

    Attributes:
      choices: possible values of flags by name, as help lists them.
      translated: names of vLLM whose values are translated into those of other flags.
    """

    choices: dict[str, Sequence[str]]
    translated: set[str]

    def __init__(self) -> None:
        super().__init__()
        vars(self)["choices"] = {}  # as an attribute it would be a flag
        vars(self)["translated"] = set()

    def __iter__(self) -> Iterator[str]:
        return (name for name in super().__iter__() if name not in self.translated)

    def read_flags_from_files(self, argv: Sequence[str], force_gnu: bool = True) -> list[str]:
        """Returns the arguments unchanged; see `flags.FlagValues`."""
        del force_gnu
        for argument in argv[: argv.index("--") if "--" in argv else None]:
            if match := _ABSL_FLAGS.fullmatch(argument):
                raise flags.UnrecognizedFlagError(match[1])
        return list(argv)


def make_flags(specs: FlagSpecs) -> Flags:
    """A flag set with these flags alone."""
    values = Flags()
    for name, spec in specs.items():
        kind, default, text, *choices = ("str", None, spec) if isinstance(spec, str) else spec
        _DEFINE[kind](name, default, text, flag_values=values)
        values.choices[name] = choices[0] if choices else ()
        values[name].allow_overwrite = name not in ONCE
    return values
