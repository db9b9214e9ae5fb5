"""Arguments of a command line as flags take them, and errors about them."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence

from absl import flags

from ssd_jax.cli.flags import ONCE, Flags
from ssd_jax.config.settings import settings_where
from ssd_jax.config.vllm_names import SAME_AS, refusal
from ssd_jax.errors import InputError
from ssd_jax.options.fields import TYPE_WORDS, wrong_value

_SHORT = {"p": "prompt", "t": "temperature", "m": "target", "n": "max_tokens"}
"""Flags that other programs know by one letter."""
_LISTS = settings_where(listed=True)
_FLAG = re.compile(r"--?([\w-]+)(=.*)?", re.DOTALL)
_BRACKETS = re.compile(r"=[\[({]([-\d., :/e]*)[\])}]")
_OTHER_NAMES = {**SAME_AS, "h": "help"}


def parse_argv(values: Flags, arguments: Sequence[str]) -> list[str]:
    """Sets flags to the values in the arguments, the first of which is the command.

    Returns: the command and the arguments that are no flags.

    Raises:
      InputError: an unknown flag, or a value of the wrong type.
    """
    try:
        return values([*arguments[:1], *_canonical_arguments(values, arguments[1:])])
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        if long_name := _SHORT.get(name):
            write = f"write --{long_name}=..." if long_name in values else "flags have whole names"
            raise InputError(f"there is no flag -{name}; {write}") from None
        if reason := refusal(_with_underscores(name)):
            raise InputError(f"there is no flag --{name}: {reason.partition(': ')[2]}") from None
        near = difflib.get_close_matches(name.removeprefix("no"), _all_names(values), n=1)
        hint = f"did you mean --{near[0]}?" if near else f"ssd-jax {arguments[0]} --help lists them"
        raise InputError(f"there is no flag --{name}; {hint}") from None
    except flags.IllegalFlagValueError as error:
        raise wrong_type(values, error) from None
    except (flags.Error, ValueError) as error:  # a ValueError for --noNAME=VALUE
        raise InputError(f"{error}; flags are given as --name=value") from None


def _all_names(values: Flags) -> list[str]:
    """Names of flags and vLLM's names for them."""
    return sorted(
        {*values, *values.translated, *(n for n, setting in SAME_AS.items() if setting in values)}
    )


def _with_underscores(name: str) -> str:
    return name.replace("-", "_")


def _canonical_arguments(values: Flags, arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with every known flag by its own name, in the form that absl takes.

    It may have been given with dashes for underscores, by vLLM's name, or as --no-NAME. Unknown
    flags, and values, stay as they are.
    """
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            yield from (argument, *remaining)
            return
        flag = _FLAG.fullmatch(argument)
        if flag is None:
            yield argument
            continue
        name, value = _with_underscores(flag[1]), flag[2]
        positive_name = name.removeprefix("no").removeprefix("_")
        name = _OTHER_NAMES.get(name, name)
        positive = _OTHER_NAMES.get(positive_name, positive_name)
        if name in values:
            yield from _with_value(values, name, value)
            if value is None and not values[name].boolean:
                yield from itertools.islice(remaining, 1)
        elif name.startswith("no") and positive in values and values[positive].boolean:
            yield f"--no{positive}{value or ''}"
        else:
            yield argument


def _with_value(values: Flags, name: str, value: str | None) -> Iterator[str]:
    """A flag with its value, in which numbers in brackets, as Python writes lists, are as flags
    take them: one text with commas, or the flag repeated."""
    match = None if value is None else _BRACKETS.fullmatch(value)
    kind = values[name].flag_type()
    if match is not None:
        numbers = "".join(match[1].split())
        if kind == "multi int" or name == "logit_bias":
            yield from (f"--{name}={number}" for number in numbers.split(","))
            return
        if kind == "comma separated list of strings" or name in _LISTS:
            value = f"={numbers}"
    yield f"--{name}{value or ''}"


def wrong_type(values: Flags, error: flags.IllegalFlagValueError) -> InputError:
    """The error for a value that absl refuses, in our words where we have some."""
    name, _, assignment = str(error).removeprefix("flag --").partition("=")
    if name in ONCE and name in values and values[name].present:
        return InputError(
            f"--{name} is given twice; give one, or a file of prompts by --prompt_file"
        )
    value = assignment.removesuffix(f": {error.__context__}")
    kind = values[name].flag_type().removeprefix("multi ") if name in values else ""
    if kind not in TYPE_WORDS:
        return InputError(" ".join(str(error).split()))
    return wrong_value(name, value, TYPE_WORDS[kind])
