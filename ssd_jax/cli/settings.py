"""Flags made from the fields of `Config` and `SamplingParams`; `--config` sets defaults."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from absl import flags

from ssd_jax.cli.entries import entry, wrapped
from ssd_jax.cli.main import COMMANDS
from ssd_jax.config.config import MEANINGLESS, Config
from ssd_jax.config.vllm_names import NAMES, SAME_AS, TRANSLATED, refusal
from ssd_jax.errors import InputError
from ssd_jax.options.fields import WANTED, not_understood
from ssd_jax.options.other_names import settings_of
from ssd_jax.options.toml_settings import read_toml
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.paths import user_path

SPECULATION = (
    *("mode", "draft", "k", "draft_dtype", "draft_temperature", "proposal_support", "verify"),
    *("budget", "fan_out", "saguaro_c", "backup", "predict", "draft_placement"),
    *("draft_devices", "target_cores", "draft_cores", "draft_token_file"),
    *("draft_workers", "draft_split"),
    *("draft_tls_ca", "draft_tls_cert", "draft_tls_key"),
)
SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name != "n")
"""Settings of a request; only one command makes several texts of a prompt."""
ENGINE = tuple(f.name for f in fields(Config) if f.name not in SPECULATION)
_CACHE = Config.__dataclass_fields__["compile_cache"]
COMPILE_CACHE = ("str", _CACHE.default, _CACHE.metadata["help"])
"""This flag of a command without the others of `Config`."""
_HEADINGS = {"engine": ("config", *ENGINE), "speculation": SPECULATION, "sampling": SAMPLING}
T = TypeVar("T", Config, SamplingParams)
_NOT_OURS = re.compile("--?(flagfile|undefok)(=.*)?", re.DOTALL)
_ONCE = ("prompt", "prompt_file")
"""Flags of which a second value would leave the first unread."""
_SHORT = {"p": "prompt", "t": "temperature", "m": "target", "n": "max_tokens"}
"""Flags that other programs know by one letter."""
_LISTS = ("fan_out", "target_devices", "draft_devices", "target_cores", "draft_cores")
"""Settings of one text that is a list."""
_FLAG = re.compile(r"--?([\w-]+)(=.*)?", re.DOTALL)
_BRACKETED = re.compile(r"=[\[({]([-\d., :/e]*)[\])}]")
_OTHER_NAMES = {**SAME_AS, "h": "help"}
_REPEATED = ";\n    repeat this option to specify a list of values"  # absl adds it


class _IntegerOrNone(flags.IntegerParser):
    """Reads "none" as None."""

    def convert(self, argument: int | str) -> Any:
        """See `flags.NumericParser`."""
        return None if argument == "none" else super().convert(argument)


_DEFINE = {
    "bool": flags.DEFINE_boolean,
    "int": flags.DEFINE_integer,
    "int or none": functools.partial(flags.DEFINE, _IntegerOrNone()),
    "float": flags.DEFINE_float,
    "str": flags.DEFINE_string,
    "int | str": flags.DEFINE_string,
    "int | float | str": flags.DEFINE_string,
    "list": flags.DEFINE_list,
    "tuple[str, ...]": flags.DEFINE_multi_string,
    "tuple[int, ...]": flags.DEFINE_multi_integer,
    "tuple[tuple[int, float], ...]": flags.DEFINE_multi_string,
}

OwnFlags = Mapping[str, str | tuple[str, Any, str] | tuple[str, Any, str, Sequence[str]]]
"""Flags of a command by name: type of the values (see `_DEFINE`), default, help, and perhaps the
possible values; for a text without a default, the help alone."""


class Flags(flags.FlagValues):
    """Flags without absl's own flagfile and undefok.

    Iterating gives all but those of `translated`.

    Attributes:
      choices: possible values of flags by name, as help and completion list them.
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
            if found := _NOT_OURS.fullmatch(argument):
                raise flags.UnrecognizedFlagError(found[1])
        return list(argv)


class HelpShown(SystemExit):
    """Ends a command that has shown its help; `listed` are the names of `flags` in it."""

    def __init__(self, flags: Flags, listed: Sequence[str]) -> None:
        super().__init__(0)
        self.flags, self.listed = flags, listed


class ConfigFile(str):
    """The path of a TOML file, and the names of the settings taken from it."""

    __slots__ = ("names",)
    names: frozenset[str]


def new_flags(own: OwnFlags | None = None, **defaults: Any) -> Flags:
    """A flag set with a command's own flags, every engine and sampling setting, and `--config`.

    `defaults` replace those of engine and sampling settings.
    """
    every = dict(own or {})
    every["config"] = "TOML file of settings; flags override it"
    both = [*fields(Config), *fields(SamplingParams)]
    for field in (each for each in both if each.name != "n"):
        text, choices = field.metadata["help"], field.metadata.get("choices", ())
        default = defaults.get(field.name, field.default)
        default = list(default) if isinstance(default, tuple) else default
        kind = str(field.type).removesuffix(" | None")
        if kind != field.type and field.default is not None:
            kind += " or none"
        every[field.name] = (kind, default, text, choices)
    values = own_flags(every)
    for name in TRANSLATED.keys() - every.keys():
        values.translated.add(name)
        flags.DEFINE_string(name, None, TRANSLATED[name].help, flag_values=values)
    return values


def own_flags(own: OwnFlags) -> Flags:
    """A flag set with these flags alone."""
    values = Flags()
    for name, about in own.items():
        kind, default, text, *choices = ("str", None, about) if isinstance(about, str) else about
        _DEFINE[kind](name, default, text, flag_values=values)
        values.choices[name] = choices[0] if choices else ()
        values[name].allow_overwrite = name not in _ONCE
    return values


def parse(
    values: Flags,
    command: str,
    arguments: Sequence[str],
    *,
    files: Sequence[str] = (),
    config_of_flags: bool = True,
    hidden: Container[str] = (),
) -> Mapping[str, Any]:
    """Parses the command line over the TOML file it names.

    Args:
      files: names of the arguments besides flags, for messages.
      config_of_flags: whether the file of `--config` sets flags; else it is a file like any other.
      hidden: flags that the help leaves out, since they mean nothing for the command.

    Returns: every flag's value by name, and every file as given by its name in `files`.

    Raises:
      InputError: an unknown flag, a value of the wrong type, stray or missing arguments, or a bad
        configuration file.
      HelpShown: `--help`.
    """
    flags.DEFINE_boolean("help", False, "show this help", flag_values=values)
    values.set_gnu_getopt()  # flags may come after files
    rest = _parsed(values, [command, *arguments])[1:]
    usage = " ".join(["ssd-jax", command, *files, "[--flag=value ...]"])
    if values["help"].value:
        listed = [name for name in values if name != "help" and name not in hidden]
        print(f"usage: {usage}\n\n{wrapped(COMMANDS[command])}\n\n{_help(values, listed)}")
        raise HelpShown(values, listed)
    if len(rest) > len(files):
        stray = rest[len(files)]
        raise InputError(f"unexpected argument {stray!r}; settings are given as --name=value")
    if len(rest) < len(files):
        raise InputError(f"{files[len(rest)]} is missing; usage: {usage}")
    _translate(values)
    if config_of_flags and "config" in values and values["config"].value is not None:
        _read_config(values)
    given = {name: values[name].value for name in values}
    for name, value in given.items():  # a value from a file may be no path of any system
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"{name} = {value!r} has a character of code 0; leave it out")
    return given | dict(zip(files, rest, strict=True))


def config_of(settings: Mapping[str, Any]) -> Config:
    """The engine's configuration from parsed flags.

    Raises:
      InputError: impossible settings.
    """
    return _built(Config, settings)


def params_of(settings: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters from parsed flags.

    Raises:
      InputError: impossible settings.
    """
    return _built(SamplingParams, settings)


def _built(kind: type[T], settings: Mapping[str, Any]) -> T:
    """A `kind` made from the settings that belong to it."""
    names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    with naming_file(settings):
        return kind(**{name: value for name, value in settings.items() if name in names})


@contextlib.contextmanager
def naming_file(settings: Mapping[str, Any]) -> Iterator[None]:
    """Adds the file's name to errors about settings from a TOML file."""
    try:
        yield
    except InputError as error:
        if names_from_file(settings) & {*re.findall(r"(\w+) (?:=|is)", str(error))}:
            raise InputError(f"config {settings['config']}: {error}") from None
        raise


def names_from_file(settings: Mapping[str, Any]) -> frozenset[str]:
    """Names of settings from a TOML file, which may also serve other commands and suites."""
    path = settings.get("config")
    return path.names if isinstance(path, ConfigFile) else frozenset()


def require_used(values: Flags, command: str, used: Sequence[str]) -> None:
    """Refuses flags that a command has no use for.

    Raises:
      InputError: the first of them.
    """
    from_file = names_from_file({"config": values["config"].value})
    for name in values:
        if values[name].present and name not in used and name not in from_file:
            takes = ", ".join(f"--{each}" for each in used)
            raise InputError(
                f"{name} means nothing for {command}, which takes {takes}; leave it out"
            )


def at_least(settings: Mapping[str, Any], **least: int) -> None:
    """Refuses numbers that are too small; settings that are not given pass.

    Raises:
      InputError: the first of them, with the least that is allowed.
    """
    for name, bound in least.items():
        if settings[name] is not None and settings[name] < bound:
            raise InputError(f"{name} = {settings[name]} is out of range; give {bound} or more")


def _translate(values: Flags) -> None:
    """Sets the flags that the given ones of `Flags.translated` stand for."""
    theirs = {name: values[name].value for name in values.translated if values[name].present}
    if not theirs:
        return
    ours = {name: values[name].value for name in values if values[name].present}
    names = {name: TRANSLATED[name] for name in theirs}
    for name, value in settings_of({**ours, **theirs}, names).items():
        if name not in ours:
            _set(values, name, value, "")


def _parsed(values: Flags, arguments: Sequence[str]) -> list[str]:
    try:
        return values([*arguments[:1], *_by_name(values, arguments[1:])])
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        if meant := _SHORT.get(name):
            write = f"write --{meant}=..." if meant in values else "flags have whole names"
            raise InputError(f"there is no flag -{name}; {write}") from None
        if why := refusal(_underscored(name)):
            raise InputError(f"there is no flag --{name}: {why.partition(': ')[2]}") from None
        near = difflib.get_close_matches(name.removeprefix("no"), _known(values), n=1)
        hint = f"did you mean --{near[0]}?" if near else f"ssd-jax {arguments[0]} --help lists them"
        raise InputError(f"there is no flag --{name}; {hint}") from None
    except flags.IllegalFlagValueError as error:
        raise _wrong_type(values, error) from None
    except (flags.Error, ValueError) as error:  # a ValueError for --noNAME=VALUE
        raise InputError(f"{error}; flags are given as --name=value") from None


def _known(values: Flags) -> list[str]:
    """Names of flags and vLLM's names for them."""
    return sorted(
        {*values, *values.translated, *(n for n, ours in SAME_AS.items() if ours in values)}
    )


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _by_name(values: Flags, arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with every known flag by its own name, in the form that absl takes.

    It may have been given with dashes for underscores, by vLLM's name, or as --no-NAME. Unknown
    flags, and values, stay as they are.
    """
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            yield from (argument, *rest)
            return
        found = _FLAG.fullmatch(argument)
        if found is None:
            yield argument
            continue
        name, value = _underscored(found[1]), found[2]
        other = name.removeprefix("no").removeprefix("_")
        name, positive = _OTHER_NAMES.get(name, name), _OTHER_NAMES.get(other, other)
        if name in values:
            yield from _with_value(values, name, value)
            if value is None and not values[name].boolean:
                yield from itertools.islice(rest, 1)
        elif name.startswith("no") and positive in values and values[positive].boolean:
            yield f"--no{positive}{value or ''}"
        else:
            yield argument


def _with_value(values: Flags, name: str, value: str | None) -> Iterator[str]:
    """A flag with its value, in which numbers in brackets, as Python writes lists, are as flags
    take them: one text with commas, or the flag repeated."""
    found = None if value is None else _BRACKETED.fullmatch(value)
    kind = values[name].flag_type()
    if found is not None:
        numbers = "".join(found[1].split())
        if kind == "multi int" or name == "logit_bias":
            yield from (f"--{name}={number}" for number in numbers.split(","))
            return
        if kind == "comma separated list of strings" or name in _LISTS:
            value = f"={numbers}"
    yield f"--{name}{value or ''}"


def _wrong_type(values: Flags, error: flags.IllegalFlagValueError) -> InputError:
    """The error for a value that absl refuses, in our words where we have some."""
    name, _, rest = str(error).removeprefix("flag --").partition("=")
    if name in _ONCE and name in values and values[name].present:
        return InputError(
            f"--{name} is given twice; give one, or a file of prompts by --prompt_file"
        )
    value = rest.removesuffix(f": {error.__context__}")
    kind = values[name].flag_type().removeprefix("multi ") if name in values else ""
    if kind not in WANTED:
        return InputError(" ".join(str(error).split()))
    return not_understood(name, value, WANTED[kind])


def _read_config(values: Flags) -> None:
    """Sets the flags that are not given to their values in the TOML file.

    Settings that mean nothing with the given mode or draft are left out.
    """
    path = ConfigFile(values["config"].value)
    theirs = {name: NAMES[name] for name in NAMES.keys() - {*values}}
    read = read_toml(user_path(path), {*values, *theirs} - {"config", "help"})
    try:
        read = settings_of(read, theirs)
    except InputError as error:
        raise InputError(f"config {path}: {error}") from None
    given = {name for name in values if values[name].present}
    chosen = [at for at in MEANINGLESS if at[0] in given and values[at[0]].value == at[1]]
    unused = {name for at in chosen for name in MEANINGLESS[at]}
    path.names = frozenset({*read} - given - unused)
    for name in path.names:
        _set(values, name, read[name], f"config {path}: ")
    values["config"].value = path


def _set(values: Flags, name: str, value: Any, where: str) -> None:
    flag = values[name]
    if isinstance(value, dict):
        raise InputError(f"{where}[{name}] is a section; give {name} = a value before all sections")
    if isinstance(value, bool) and not flag.boolean:
        raise InputError(f"{where}{name} = {str(value).lower()} is a boolean; give another value")
    if isinstance(value, list):
        words = [str(item) for item in value]
        value = ",".join(words) if flag.flag_type() == "string" else words
    try:
        flag.parse(value if isinstance(value, list) else str(value))
    except flags.IllegalFlagValueError as error:
        raise InputError(f"{where}{_wrong_type(values, error)}") from None


def _help(values: Flags, listed: Sequence[str]) -> str:
    """The command's own flags, then those of each heading."""
    headings = _HEADINGS if {*SAMPLING} <= {*values} else {}
    known = {name for names in headings.values() for name in names}
    lines = [_described(values, name) for name in listed if name not in known]
    lines.append(_described(values, "help"))
    for heading, names in headings.items():
        if of_it := [name for name in names if name in listed]:
            lines += ["", f"{heading}:", *(_described(values, name) for name in of_it)]
    return "\n".join(lines)


def _described(values: Flags, name: str) -> str:
    default, choices = _shown(values[name].default), values.choices.get(name, ())
    text = " ".join(values[name].help.replace(_REPEATED, "; may be repeated").split())
    text += f": {', '.join(choices)}" if choices else ""
    text += f" (default {default})" if default and name != "help" else ""
    return entry(f"--{name}", text)


def _shown(default: Any) -> str:
    """A default as it is typed; empty where it is None: the help may say what holds then."""
    if isinstance(default, list):
        return ",".join(map(str, default))
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None else str(default)
