"""Paths from users: what they mean, and whether files can be written there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ssd_jax.errors import InputError


def user_path(text: str) -> Path:
    """The path that a user means; ~ is their home.

    Raises:
      InputError: ~ names a user that does not exist, or a character is invalid in paths.
    """
    if "\0" in text:
        raise InputError(f"{text!r} has a character of code 0, which no path has; leave it out")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = Path(text).parts[0]
        raise InputError(f"{text!r}: {user} has no home directory; give the whole path") from None


def require_free(directory: Path) -> None:
    """Refuses a place for a new directory if it holds anything.

    Raises:
      InputError: it exists and is not an empty directory.
    """
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise InputError(f"{directory} exists and is not empty; remove it or name another one")


def require_writable(name: str, path: Path, *, atomic: bool = False) -> None:
    """Checks that a file or directory can be written, by trying before the work that makes its
    content; leaves nothing there.

    Missing directories will be created, so the nearest existing one is tried.

    Args:
      name: of the setting, for messages.
      path: file or directory to be written.
      atomic: whether it is written beside its place and then moved there.

    Raises:
      InputError: the path is a device or the like, or nothing can be written there.
    """
    try:
        if path.exists() and not path.is_dir():
            if not path.is_file():
                raise InputError(f"{name} = '{path}' is a device or a pipe; give a file")
            path.open("ab").close()
        directory = path.absolute().parent if atomic else path.absolute()
        while not directory.exists():
            directory = directory.parent
        if atomic or not path.is_file():
            tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise InputError(
            f"{name} = '{path}' cannot be written: {error.strerror or error}; give another place"
        ) from None
