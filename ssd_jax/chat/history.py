"""Entries of earlier sessions, one JSON string a line, so that an entry may have several lines."""

from __future__ import annotations

import json
from pathlib import Path

from ssd_jax.errors import InputError
from ssd_jax.files import MOST_TEXT, parse_json, read_text

_KEPT = 1000


class HistoryFile:
    """A file that entries are appended to as they are made; only its owner may read it.

    A history is a convenience: where the file cannot be read or written there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[str]:
        """The newest entries, oldest first; a file that has grown long is cut to them."""
        try:
            lines = read_text(self._path, most=MOST_TEXT).split("\n")
        except InputError:
            return []
        entries = [entry for line in lines if (entry := _entry(line)) is not None]
        if len(entries) > 2 * _KEPT:
            self._write("w", entries[-_KEPT:])
        return entries[-_KEPT:]

    def append(self, entry: str) -> None:
        """Adds one entry."""
        self._write("a", [entry])

    def _write(self, how: str, entries: list[str]) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            with self._path.open(how, encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        except OSError:
            return


def _entry(line: str) -> str | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
