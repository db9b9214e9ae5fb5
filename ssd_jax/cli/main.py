"""`ssd-jax COMMAND [--flags]`: dispatch, and the exit status of every failure."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from ssd_jax import __version__
from ssd_jax.cli.entries import entry
from ssd_jax.errors import InputError, SsdError
from ssd_jax.options.wording import as_flags
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.system.collection import collect_seldom
from ssd_jax.system.leaving import leave

COMMANDS = {
    "generate": "complete prompts",
    "serve": "answer OpenAI's interface over HTTP",
    "chat": "talk to a model in the terminal",
    "compare": "show where two runs of a prompt file diverge",
    "bench": "measure speed on prompt sets, or the cost of a forward",
    "convert": "write a checkpoint that loads in seconds",
    "distill": "train a small draft on a target's own text",
    "follower": "join the leader, a command with --hosts, in running a multi-process target",
    "aot": "report whether two models fit a mesh of chips, and whether SSD pays",
    "demo": "answer short prompts in every mode and show the speed",
    "trace": "draw a file of --trace: target and draft, round by round",
    "draft-worker": "serve a draft to engines on other hosts",
    "models": "list the models cached on this machine",
}
_REPLACED = {"plan-mesh": "ssd-jax aot --compile=false --mesh=... says what fits"}
"""Commands that there were, and what to do instead."""
_INTERRUPTED = 130
_UNUSABLE = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EROFS, errno.EEXIST, errno.ENXIO),
}
"""Errors of a named file where another file would do; others, such as a full disk, are failures."""
_OF_STREAMS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns: exit status; 0 done, 1 failure, 2 bad usage or input, 130 interrupted; a command may
      have others of its own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        collect_seldom()
    _open_missing_streams()
    if os.environ.get("COLUMNS") == "0":  # the width is unknown
        del os.environ["COLUMNS"]
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_OneLine())
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a character shows "?"
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except SsdError as error:
        return _report_failure(arguments, str(error), error.exit_status)
    except KeyboardInterrupt:
        if argv is None:
            leave("", _INTERRUPTED)  # Python's own exit waits for compilers
        return _INTERRUPTED
    except BrokenPipeError:
        return _lost_output()
    except OSError as error:
        if error.filename is None:
            _lost_output()
        bad = error.errno in _UNUSABLE and error.filename is not None
        status = InputError.exit_status if bad else SsdError.exit_status
        return _report_failure(
            arguments, _describe_error(error, _remedy(error) if bad else ""), status
        )
    except RuntimeError as error:
        if "can't start new thread" in str(error):
            why = (
                "the system starts no more threads; allow more memory or processes (ulimit -v, -u)"
            )
            return _report_failure(arguments, why, SsdError.exit_status)
        if not _is_of_device(error):
            raise
        first_line = (str(error).splitlines() or [repr(error)])[0]
        return _report_failure(
            arguments, f"a device has failed: {first_line}", SsdError.exit_status
        )
    except MemoryError:
        remedy = "lower --slots, --context or --budget, or take a smaller model"
        return _report_failure(arguments, f"out of memory; {remedy}", SsdError.exit_status)


class _OneLine(logging.Formatter):
    """Formats log records without tracebacks, with settings as flags."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return as_flags(super().format(record))

    @override
    def formatException(self, ei: Any) -> str:
        del ei
        return ""  # no traceback


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "help":
        return _run([*arguments[1:], "--help"])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else InputError.exit_status
    if arguments[0] == "--version":
        print(__version__)
        return 0
    if arguments[0] not in COMMANDS:
        if arguments[0] in _REPLACED:
            raise InputError(f"there is no such command; {_REPLACED[arguments[0]]}")
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(COMMANDS)}"
        raise InputError(f"unknown command {arguments[0]!r}; {hint}")
    name = arguments[0].replace("-", "_")
    return importlib.import_module(f"ssd_jax.cli.{name}").run(arguments[1:])


def _is_of_device(error: RuntimeError) -> bool:
    """Whether JAX raised it; JAX may not be imported yet."""
    return "jax" in sys.modules and isinstance(error, sys.modules["jax"].errors.JaxRuntimeError)


def _report_failure(arguments: Sequence[str], message: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(f"{' '.join(['ssd-jax', *arguments[:1]])}: {as_flags(message)}", file=sys.stderr)
    return status


def _describe_error(error: OSError, remedy: str) -> str:
    subject = error.filename
    if subject is None and error.errno in _OF_STREAMS:
        subject = "standard input or output"
    reason = error.strerror or str(error)
    return f"{'' if subject is None else f'{subject}: '}{reason}{remedy and '; '}{remedy}"


def _remedy(error: OSError) -> str:
    with contextlib.suppress(FileNotFoundError):  # no home directory
        if Path(os.fsdecode(error.filename)).is_relative_to(cache_dir()):
            return "give another cache by XDG_CACHE_HOME"
    return "name another one"


def _lost_output() -> int:
    """Discards buffered output, whose reader is gone or whose disk is full; returns the status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return SsdError.exit_status


def _open_missing_streams() -> None:
    """Opens an empty stream for each that was closed when the program started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            empty = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 (stays open)
            setattr(sys, name, empty)


def _usage() -> str:
    lines = [entry(name, text) for name, text in COMMANDS.items()]
    hint = "ssd-jax COMMAND --help lists the flags of a command"
    return "\n".join(["usage: ssd-jax COMMAND [--flag=value ...]", "", *lines, "", hint])
