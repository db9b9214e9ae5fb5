"""Secrets that are given as files."""

from __future__ import annotations

import stat

from ssd_jax.errors import InputError
from ssd_jax.system.paths import user_path

_SHORTEST, _LONGEST = 16, 1024  # characters


def read_secret(path: str, name: str) -> str:
    """The secret in a file.

    Args:
      name: of the setting that names the file.

    Raises:
      InputError: the file cannot be read, others can read it, or the secret is too short.
    """
    file = user_path(path)
    try:
        text = file.read_bytes().decode("ascii", "replace").strip()
        others = file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError as error:
        raise InputError(f"{name} = {path!r} cannot be read: {error.strerror}") from None
    if others:
        raise InputError(f"{name} = {path!r} can be read by others; chmod 600 it")
    if not _SHORTEST <= len(text) <= _LONGEST or not text.isascii() or not text.isprintable():
        raise InputError(
            f"{name} = {path!r} has no secret of {_SHORTEST} to {_LONGEST} printable "
            "ASCII characters; make one with: openssl rand -hex 32"
        )
    return text
