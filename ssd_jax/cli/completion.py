"""`ssd-jax completion SHELL`: a script that has the shell complete commands and flags."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssd_jax.cli import settings
from ssd_jax.cli.main import COMMANDS, module_of
from ssd_jax.config import Config
from ssd_jax.errors import InputError

_CHOICES = {name: field.metadata["choices"] for name, field in Config.__dataclass_fields__.items()}


class _Flag(NamedTuple):
    name: str
    text: str
    boolean: bool
    choices: Sequence[str]


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    given = settings.parse(settings.own_flags({}), "completion", arguments, files=["SHELL"])
    shell = given["SHELL"]
    if shell not in _SCRIPTS:
        raise InputError(f"SHELL = {shell!r} is unknown; one of {list(_SCRIPTS)}")
    flags = {command: _flags(command) for command in COMMANDS}
    print(_SCRIPTS[shell](COMMANDS, flags))
    return 0


def _flags(command: str) -> list[_Flag]:
    """What the command's help lists."""
    if command == "completion":
        return []
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module_of(command).run(["--help"])
    except settings.HelpShown as shown:
        return [
            _Flag(name, _first(flag.help), flag.boolean, _CHOICES.get(name, ()))
            for name in shown.listed
            for flag in [shown.flags[name]]
        ]
    raise AssertionError("--help ends a command")


def _first(text: str) -> str:
    """The beginning of a help text, without what a shell could take for its own."""
    return re.sub(r"[^\w ,.-]", "", re.split("[;:(]", " ".join(text.split()))[0]).strip()


def _bash(commands: Mapping[str, str], flags: Mapping[str, Sequence[_Flag]]) -> str:
    cases = []
    for command, found in flags.items():
        words = " ".join(f"--{flag.name}{'' if flag.boolean else '='}" for flag in found)
        cases.append(f"    {command}) words='{words}' ;;")
    values = {flag.name: flag.choices for found in flags.values() for flag in found if flag.choices}
    chosen = [f"    --{name}) words='{' '.join(found)}' ;;" for name, found in values.items()]
    return "\n".join(
        [
            "_ssd_jax() {",
            '  local words="" cur="${COMP_WORDS[COMP_CWORD]}" flag=""',
            '  if [[ $cur == = ]]; then cur=""; flag="${COMP_WORDS[COMP_CWORD-1]}"',
            "  elif [[ ${COMP_WORDS[COMP_CWORD-1]} == = ]]; then",
            '    flag="${COMP_WORDS[COMP_CWORD-2]}"',
            "  fi",
            "  compopt +o nospace",
            f"  if (( COMP_CWORD == 1 )); then words='{' '.join(commands)}'",
            '  elif [[ -n $flag ]]; then case "$flag" in',
            *chosen,
            "  esac",
            '  elif [[ $cur == -* ]]; then compopt -o nospace; case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac; fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            "complete -o default -F _ssd_jax ssd-jax",
        ]
    )


def _zsh(commands: Mapping[str, str], flags: Mapping[str, Sequence[_Flag]]) -> str:
    def argument(flag: _Flag) -> str:
        if flag.boolean:
            return f"'--{flag.name}[{flag.text}]'"
        values = f"({' '.join(flag.choices)})" if flag.choices else "_files"
        return f"'--{flag.name}=[{flag.text}]:{flag.name}:{values}'"

    cases = []
    for command, found in flags.items():
        listed = " ".join(["'*:file:_files'", *map(argument, found)])
        cases.append(f"    {command}) _arguments {listed} ;;")
    described = " ".join(f"'{name}:{_first(text)}'" for name, text in commands.items())
    return "\n".join(
        [
            "#compdef ssd-jax",
            "_ssd_jax() {",
            f"  local -a commands=({described})",
            "  if (( CURRENT == 2 )); then _describe command commands; return; fi",
            "  local command=$words[2]",
            "  shift words; (( CURRENT-- ))",
            "  case $command in",
            *cases,
            "  esac",
            "}",
            "compdef _ssd_jax ssd-jax",
        ]
    )


def _fish(commands: Mapping[str, str], flags: Mapping[str, Sequence[_Flag]]) -> str:
    start = "complete -c ssd-jax"
    lines = [
        f"{start} -f -n __fish_use_subcommand -a {name} -d '{_first(text)}'"
        for name, text in commands.items()
    ]
    for command, found in flags.items():
        for flag in found:
            values = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else " -r"
            lines.append(
                f"{start} -n '__fish_seen_subcommand_from {command}' -l {flag.name}"
                f"{'' if flag.boolean else values} -d '{flag.text}'"
            )
    return "\n".join(lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
