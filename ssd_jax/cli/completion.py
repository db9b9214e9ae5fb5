"""`ssd-jax completion SHELL`: a script with which the shell completes commands and flags."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ssd_jax.cli import settings
from ssd_jax.cli.main import COMMANDS, module_of
from ssd_jax.config.vllm_names import SAME_AS
from ssd_jax.errors import InputError

_DRAFTS = ("default", "ngram")
"""Drafts that commands that decode take besides paths."""


class _Flag(NamedTuple):
    """A flag, or another spelling of one; with `files`, values besides the choices are files."""

    name: str
    text: str
    boolean: bool
    choices: Sequence[str]
    files: bool


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    given = settings.parse(settings.own_flags({}), "completion", arguments, files=["SHELL"])
    shell = given["SHELL"]
    if shell not in _SCRIPTS:
        raise InputError(f"SHELL = {shell!r} is unknown; one of {', '.join(_SCRIPTS)}")
    flags = {command: _flags(command) for command in COMMANDS}
    print(_SCRIPTS[shell](COMMANDS, flags))
    return 0


def _flags(command: str) -> list[_Flag]:
    """Flags that the command's help lists, and others that it takes: vLLM's names and --noNAME."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module_of(command).run(["--help"])
    except settings.HelpShown as shown:
        names = {name: name for name in (*shown.listed, "help")}
        names |= {theirs: ours for theirs, ours in SAME_AS.items() if ours in names}
        if "mode" in names:
            names |= {name: name for name in sorted(shown.flags.translated)}
        choices, found = shown.flags.choices, []
        for name, ours in names.items():
            flag, words = shown.flags[ours], choices.get(ours, ())
            files = not words
            if name == "draft" and "mode" in names:
                words = _DRAFTS
            found.append(_Flag(name, _first(flag.help), flag.boolean, words, files))
            if flag.boolean and name != "help":
                found.append(_Flag(f"no{name}", f"not {name}", True, (), False))
        return found
    raise AssertionError("--help ends a command")


def _first(text: str) -> str:
    """The beginning of a help text, without characters that a shell could interpret."""
    return re.sub(r"[^\w ,.-]", "", re.split("[;:(]", " ".join(text.split()))[0]).strip()


def _words(commands: Iterable[str]) -> dict[str, str]:
    """What follows a command that takes a word."""
    return {"completion": " ".join(_SCRIPTS), "help": " ".join(commands)}


def _bash(commands: Mapping[str, str], flags: Mapping[str, Sequence[_Flag]]) -> str:
    values = [
        f"    '{name} {name}') words='{words}' ;;" for name, words in _words(commands).items()
    ]
    names = []
    for command, found in flags.items():
        for flag in found:
            if flag.choices:
                words = " ".join(flag.choices)
                values.append(f"    '{command} --{flag.name}') words='{words}' ;;")
        listed = " ".join(f"--{flag.name}{'' if flag.boolean else '='}" for flag in found)
        names.append(f"    {command}) words='{listed}' ;;")
    return "\n".join(
        [
            "_ssd_jax() {",
            '  local words="" cur="${COMP_WORDS[COMP_CWORD]}" flag="${COMP_WORDS[COMP_CWORD-1]}"',
            '  if [[ $cur == = ]]; then cur=""',
            '  elif [[ $flag == = ]]; then flag="${COMP_WORDS[COMP_CWORD-2]}"; fi',
            '  if [[ $flag == --* ]]; then flag="${flag:2}"; flag="--${flag//-/_}"; fi',
            "  compopt +o nospace",
            '  case "${COMP_WORDS[1]} $flag" in',
            *values,
            "  esac",
            f"  if (( COMP_CWORD == 1 )); then words='{' '.join(commands)}'",
            "  elif [[ ${COMP_WORDS[COMP_CWORD-1]} != = && $cur == -* ]]; then",
            "    compopt -o nospace",
            '    case "${COMP_WORDS[1]}" in',
            *names,
            "    esac",
            '    if [[ ${cur#--} == *-* ]]; then words="${words//_/-}"; fi',
            "  fi",
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
        if flag.choices and flag.files:
            values = f'{{_alternative "words\\:{flag.name}\\:{values}" "files\\:file\\:_files"}}'
        return f"'--{flag.name}=[{flag.text}]:{flag.name}:{values}'"

    cases, words = [], _words(commands)
    for command in [*flags, "help"]:
        first = f"'1:word:({words[command]})'" if command in words else "'*:file:_files'"
        listed = " ".join([first, *map(argument, flags.get(command, ()))])
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
    for command, words in _words(commands).items():
        lines.append(f"{start} -f -n '__fish_seen_subcommand_from {command}' -a '{words}'")
    for command, found in flags.items():
        for flag in found:
            values = " -r" if flag.files else " -x"
            if flag.choices:
                values += f" -a '{' '.join(flag.choices)}'"
            lines.append(
                f"{start} -n '__fish_seen_subcommand_from {command}' -l {flag.name}"
                f"{'' if flag.boolean else values} -d '{flag.text}'"
            )
    return "\n".join(lines)


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
