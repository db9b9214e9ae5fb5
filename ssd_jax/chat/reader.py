"""Reads entries: from a terminal with line editing and history, or from the lines of a pipe."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Protocol, TextIO

from ssd_jax.chat.entry import COMMANDS, is_open
from ssd_jax.chat.history import HistoryFile

_PROMPT, _MORE = "> ", ". "
_IN_GREEN = "\001\033[1;32m\002{}\001\033[0m\002"  # readline must not count what has no width


class Reader(Protocol):
    """Where entries come from."""

    def read(self) -> str:
        """The next entry, raw.

        Raises:
          EOFError: there is no more.
          KeyboardInterrupt: Ctrl-C.
        """
        ...

    @property
    def cleared(self) -> bool:
        """Whether the last Ctrl-C took something that had been typed."""
        ...


class PipeReader:
    """Entries from a file or a pipe; no prompt is shown."""

    cleared = False

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def read(self) -> str:
        """See `Reader`."""
        return _entry(lambda _first: self._line())

    def _line(self) -> str:
        line = self._lines.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")


class TerminalReader:
    """Entries typed at a terminal, with line editing where Python has readline.

    A text that is pasted whole is one entry, line ends and all, where readline can tell.

    Args:
      history: earlier entries; None keeps none beyond this session.
      plain: a terminal without colours and escape sequences.
      colour: whether the prompt may have one.
    """

    def __init__(self, history: HistoryFile | None, *, plain: bool, colour: bool) -> None:
        self._history = history
        self._last = ""
        self._lines = 0
        self._readline = _readline(plain=plain)
        # libedit shows the marks around a colour.
        self._colour = colour and self._readline is not None and not _is_libedit(self._readline)
        if self._readline is not None:
            for entry in history.read() if history is not None else []:
                self._readline.add_history(entry)
                self._last = entry

    def read(self) -> str:
        """See `Reader`."""
        self._lines = 0
        raw = _entry(self._line)
        if raw.strip() and raw != self._last:
            self._last = raw
            if self._readline is not None:
                self._readline.add_history(raw)
            if self._history is not None:
                self._history.append(raw)
        return raw

    @property
    def cleared(self) -> bool:
        """See `Reader`."""
        typed = self._readline is not None and self._readline.get_line_buffer()
        return bool(typed) or self._lines > 0

    def _line(self, first: bool) -> str:
        prompt = _PROMPT if first else _MORE
        line = input(_IN_GREEN.format(prompt) if self._colour else prompt)
        self._lines += 1
        return line


def _entry(line: Callable[[bool], str]) -> str:
    """A whole entry of `line(is it the first)`; the end of the input ends an open one."""
    raw = line(True)
    while is_open(raw):
        try:
            raw = f"{raw}\n{line(False)}"
        except EOFError:
            break
    return raw


def _readline(*, plain: bool) -> ModuleType | None:
    """The readline module, set up for entries; None where Python was built without."""
    try:
        import readline
    except ImportError:
        return None
    readline.set_auto_history(False)  # lines are not entries
    readline.set_completer_delims(" ")
    readline.set_completer(_complete)
    if _is_libedit(readline):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        if not plain:
            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    return readline


def _complete(start: str, state: int) -> str | None:
    """The `state`-th command that starts so, for the tab key."""
    names = [f"/{name} " for name in COMMANDS if start and f"/{name}".startswith(start)]
    return names[state] if state < len(names) else None


def _is_libedit(readline: ModuleType) -> bool:
    return "libedit" in (readline.__doc__ or "")
