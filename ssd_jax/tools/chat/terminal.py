"""Entries typed at a terminal, with line editing and a history of earlier ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style
from prompt_toolkit.utils import is_dumb_terminal

from ssd_jax.errors import InputError
from ssd_jax.system.files import MAX_TEXT, parse_json, read_text
from ssd_jax.tools.chat.entry import COMMANDS, entries, is_open

_MAX_ENTRIES = 1000
_PROMPT, _CONTINUATION = "> ", ". "


class TerminalReader:
    """Reads entries; a text that is pasted at once is one entry, line ends included.

    On a terminal without escape sequences there is neither line editing nor a history.

    Args:
      history: file of earlier entries; None keeps none beyond this session.
    """

    def __init__(self, history: Path | None) -> None:
        self._session = None if is_dumb_terminal() else _session(history)

    def read(self) -> str:
        """The next entry, raw.

        Raises:
          EOFError: Ctrl-D.
          KeyboardInterrupt: Ctrl-C.
        """
        return next(entries(_typed_lines())) if self._session is None else self._session.prompt()

    @property
    def discarded_text(self) -> bool:
        """Whether the last Ctrl-C discarded typed text, as far as that is known."""
        return self._session is not None and bool(self._session.default_buffer.text)


def _typed_lines() -> Iterator[str]:
    """The lines of an entry."""
    yield input(_PROMPT)
    with contextlib.suppress(EOFError):
        while True:
            yield input(_CONTINUATION)


def _session(history: Path | None) -> PromptSession[str]:
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        output.enable_cpr = False  # no menu needs the cursor's place; not all terminals report it
    keys = KeyBindings()
    keys.add("enter")(_enter)
    return PromptSession(
        [("class:prompt", _PROMPT)],
        prompt_continuation=_CONTINUATION,
        multiline=True,
        key_bindings=keys,
        history=InMemoryHistory() if history is None else HistoryFile(history),
        completer=WordCompleter([f"/{name} " for name in COMMANDS], sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        enable_suspend=True,
        style=Style.from_dict({"prompt": "ansigreen bold"}),
        output=output,
    )


def _enter(event: KeyPressEvent) -> None:
    """Handles Enter: an open entry continues in another line."""
    buffer = event.current_buffer
    if is_open(buffer.text):
        buffer.newline(copy_margin=False)
    else:
        buffer.validate_and_handle()


class HistoryFile(History):
    """A file of entries that only its owner may read.

    Each line is a JSON string, so that an entry may have several lines. A history is a convenience:
    if the file cannot be read or written, there is none.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The newest entries, newest first; a file of many entries is cut to these."""
        try:
            lines = read_text(self._path, max_bytes=MAX_TEXT).split("\n")
        except InputError:
            return []
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        if len(entries) > 2 * _MAX_ENTRIES:
            self._write("w", entries[-_MAX_ENTRIES:])
        return entries[: -_MAX_ENTRIES - 1 : -1]

    def store_string(self, string: str) -> None:
        """Adds an entry."""
        self._write("a", [string])

    def _write(self, mode: str, entries: list[str]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            with self._path.open(mode, encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        except OSError:
            return


def _entry(line: str) -> str | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
