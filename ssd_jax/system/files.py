"""Reads files that others wrote: only regular ones, of limited size, never trusted.

Anything wrong with such a file is an `InputError` that names it: no caller sees an `OSError`,
`UnicodeDecodeError` or `RecursionError`. Functions take the file's `path`, the bytes that it
may have (`max_bytes`; None is any number), and what to do about a bad file (`remedy`).
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import itertools
import json
import re
import reprlib
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from gzip import GzipFile
from pathlib import Path
from typing import Any, BinaryIO

from ssd_jax.errors import InputError

GET_AGAIN = "get the file again"

MAX_JSON = 8 << 20
"""Bytes of a JSON document, which takes up to 25 times as many when decoded."""

MAX_TEXT = 64 << 20
"""Bytes of a text that is read whole."""

MAX_UNPACKED = 128 << 20
"""Bytes that a compressed text may unpack to."""

MAX_LINES = 500_000
"""Lines of a file that is read line by line, empty ones included."""

MAX_DEPTH = 100
"""Nesting of objects and lists; deeper nesting would end in a `RecursionError` later."""

_FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, *, remedy: str = GET_AGAIN) -> io.BufferedReader:
    """Opens a regular file, or a symbolic link to one; never waits for a writer.

    Raises:
      InputError: the file is missing, unreadable or not regular.
    """
    with reading(path, remedy=remedy):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = _FILE_TYPES.get(stat.S_IFMT(mode), "no file")
            raise InputError(f"{path} is {kind}; give a regular file")
        return path.open("rb")


@contextlib.contextmanager
def reading(path: Path, *, remedy: str = GET_AGAIN) -> Iterator[None]:
    """Turns an `OSError` of the block into an `InputError` that names the file."""
    try:
        yield
    except PermissionError as error:
        raise InputError(
            f"no permission to read {error.filename or path}; give this user access to it (chmod, "
            "chown) or get it as this user"
        ) from None
    except FileNotFoundError as error:
        raise InputError(f"{error.filename or path} does not exist; {remedy}") from None
    except OSError as error:
        raise InputError(
            f"{error.filename or path} cannot be read: {error.strerror or error}; {remedy}"
        ) from None


def read_bytes(path: Path, *, max_bytes: int | None = None, remedy: str = GET_AGAIN) -> bytes:
    """All bytes of a regular file, which may have at most `max_bytes`."""
    with open_regular(path, remedy=remedy) as file, reading(path, remedy=remedy):
        data = file.read() if max_bytes is None else file.read(max_bytes + 1)
    if max_bytes is not None and len(data) > max_bytes:
        raise InputError(f"{path} has more than {max_bytes} bytes, which is the limit; {remedy}")
    return data


def read_text(path: Path, *, max_bytes: int | None = None, remedy: str = GET_AGAIN) -> str:
    """A text file in UTF-8; every line ending becomes a newline."""
    text = decode(read_bytes(path, max_bytes=max_bytes, remedy=remedy), path, remedy=remedy)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode(data: bytes, path: Path, *, remedy: str, encoding: str = "utf-8") -> str:
    """Bytes of a file as text; the encoding "utf-8-sig" drops a byte order mark.

    Raises:
      InputError: they are not UTF-8; the message names the line.
    """
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not UTF-8 (byte {error.start} of the file); {remedy}"
        ) from None


def read_json(path: Path, *, max_bytes: int = MAX_JSON, remedy: str = GET_AGAIN) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      InputError: see `read_text`; or it is not JSON, nested deeper than `MAX_DEPTH`, or no object.
    """
    text = read_text(path, max_bytes=max_bytes, remedy=remedy)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise InputError(f"{path} is not readable JSON: {brief(error)}; {remedy}") from None
    if not isinstance(value, dict):
        kind = "null" if value is None else type(value).__name__
        raise InputError(f"{path} holds a JSON {kind}, expected an object; {remedy}")
    return value


def parse_json(text: str) -> Any:
    """`json.loads` that refuses nesting deeper than `MAX_DEPTH`.

    Raises:
      ValueError: the text is nested deeper, or is not JSON.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    require_shallow(value)
    return value


_TOO_DEEP = f"nested too deeply, the limit is {MAX_DEPTH} levels"


def require_shallow(value: object) -> None:
    """Refuses objects and lists nested deeper than `MAX_DEPTH`.

    Raises:
      ValueError: they are nested deeper.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def read_lines(
    path: Path, *, remedy: str, stream: BinaryIO | None = None
) -> Iterator[tuple[int, str]]:
    """The lines of a text file (gzip if its name ends in .gz) with their numbers, from 1.

    Of a `stream` that is given, `path` is the name for messages, and its lines are never gzip.
    Holds one line at a time, whatever the file unpacks to. Only a newline ends a line; it and a
    byte order mark are not part of the text.

    Raises:
      InputError: see `open_regular`; or there are more than `MAX_LINES` lines, a line is longer
        than `MAX_JSON` or not UTF-8, or gzip is damaged or unpacks to more than `MAX_UNPACKED`.
    """
    unpacked_bytes = 0
    try:
        context = open_regular(path, remedy=remedy) if stream is None else nullcontext(stream)
        with context as packed:
            gzipped = stream is None and path.suffix == ".gz"
            file = GzipFile(fileobj=packed) if gzipped else packed
            for number in itertools.count(1):
                line = file.readline(MAX_JSON + 1)
                if not line:
                    return
                if number > MAX_LINES:
                    raise InputError(f"{path} has more than {MAX_LINES} lines; split the file")
                if len(line) > MAX_JSON:
                    raise InputError(f"{path}:{number} is longer than {MAX_JSON} bytes; {remedy}")
                unpacked_bytes += len(line)
                if gzipped and unpacked_bytes > MAX_UNPACKED:
                    raise InputError(
                        f"{path} unpacks to more than {MAX_UNPACKED} bytes, which is the limit; "
                        "split it, or give it unpacked"
                    )
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{path}:{number}: not UTF-8 (byte {error.start} of the line); {remedy}"
                    ) from None
                yield number, text.removesuffix("\n")
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: cannot be read: {reason}; {remedy}") from None


def require_plain_name(name: object, where: Path) -> str:
    """The plain name of a file next to `where`, which names it; a path elsewhere is refused.

    Raises:
      InputError: it is not a plain name.
    """
    if (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()
        and not set(name) & set("/\\")
        and len(name.encode()) <= _MAX_NAME
    ):
        return name
    raise InputError(
        f"{where} names the file {shown(name)}, which is no plain name of a file beside it; "
        f"{GET_AGAIN}"
    )


_MAX_NAME = 200
"""Bytes, leaving room for what is put around the name while the file is written."""


def shown(value: object) -> str:
    """A value as one short line, for errors."""
    return _REPR.repr(value)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that another was meant to be; None if it resembles none."""
    close = difflib.get_close_matches(name[:_MAX_NAME], [*names], n=1)
    return close[0] if close else None


def is_unicode(text: str) -> bool:
    """Whether a text has a UTF-8 form: it holds no lone surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def printable(text: str) -> str:
    """Text without control characters, which could move the cursor or rename the window."""
    return _CONTROL.sub("\ufffd", text.replace("\r", ""))  # \r and \n may come in two pieces


def brief(error: BaseException, *, end: bool = False) -> str:
    """An error's message as one short line: other libraries quote whatever they were given.

    Args:
      end: whether a long one's end says more than its beginning.
    """
    text = " ".join(str(error).split())
    if len(text) <= _MAX_WORDS:
        return text
    return f"...{text[-_MAX_WORDS:]}" if end else f"{text[:_MAX_WORDS]}..."


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_MAX_WORDS = 300
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open_regular(path) as file, reading(path):
        return hashlib.file_digest(file, "sha256").hexdigest()
