"""`ssd-jax COMMAND [--flags]`: dispatch, and the exit status of every failure."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from absl import flags

from ssd_jax import __version__
from ssd_jax.errors import InputError, SsdError

COMMANDS = {
    "generate": "complete prompts",
    "chat": "talk to a model in the terminal",
    "compare": "show where two runs of the same prompts part",
    "bench": "measure speed on prompt sets, or the cost of a forward",
    "convert": "write a checkpoint that loads in seconds",
    "distill": "train a small draft on a target's own text",
    "demo": "answer one prompt and show the speed",
    "trace": "draw what --trace wrote: target and draft, round by round",
}
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns: exit status; 0 done, 1 failure, 2 bad usage or input, 130 interrupted; a command may
      have others of its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a character shows "?"
        sys.stdout.reconfigure(errors="replace")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(__version__)
        return 0
    try:
        status = _command(arguments[0]).run(arguments[1:])
        sys.stdout.flush()
        return status
    except SsdError as error:
        print(f"ssd-jax {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_status
    except flags.Error as error:
        print(f"ssd-jax {arguments[0]}: {error}", file=sys.stderr)
        return InputError.exit_status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has gone; what is buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SsdError.exit_status
    except OSError as error:
        print(f"ssd-jax {arguments[0]}: {error}", file=sys.stderr)
        return SsdError.exit_status


def _command(name: str):
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(COMMANDS)}"
        raise InputError(f"unknown command {name!r}; {hint}")
    return importlib.import_module(f"ssd_jax.commands.{name}")


def _usage() -> str:
    lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        ["usage: ssd-jax COMMAND [--flag=value ...]", "", *lines, "", "ssd-jax COMMAND --help"]
    )
