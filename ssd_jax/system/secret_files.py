"""Secrets that are given as files."""

from __future__ import annotations

import stat

from ssd_jax.errors import InputError
from ssd_jax.system.paths import user_path

_SHORTEST, _LONGEST = 16, 1024  # characters
_FORM = f"{_SHORTEST} to {_LONGEST} printable ASCII characters"
_REMEDY = "make one with: openssl rand -hex 32"


def read_secret(path: str, name: str) -> str:
    """The secret in a file.

    Args:
      name: of the setting that names the file.

    Raises:
      InputError: the file cannot be read, others can read it, or the secret is too short.
    """
    secret = _private_text(path, name)
    if not _is_secret(secret):
        raise InputError(f"{name} = {path!r} has no secret of {_FORM}; {_REMEDY}")
    return secret


def read_secrets(path: str, name: str) -> tuple[str, ...]:
    """The secrets in a file, one a line; empty lines are none.

    Args:
      name: of the setting that names the file.

    Raises:
      InputError: the file cannot be read, others can read it, it has no secret, or one that is too
        short or has spaces.
    """
    secrets = []
    for number, line in enumerate(_private_text(path, name).splitlines(), start=1):
        secret = line.strip()
        if secret and (not _is_secret(secret) or " " in secret):
            raise InputError(
                f"{name} = {path!r}, line {number}: no secret of {_FORM} without spaces; {_REMEDY}"
            )
        secrets += [secret] if secret else []
    if not secrets:
        raise InputError(f"{name} = {path!r} has no secret; {_REMEDY}")
    return tuple(secrets)


def _private_text(path: str, name: str) -> str:
    """The text of a file that only its owner can read."""
    file = user_path(path)
    try:
        text = file.read_bytes().decode("ascii", "replace").strip()
        others = file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    except OSError as error:
        raise InputError(f"{name} = {path!r} cannot be read: {error.strerror}") from None
    if others:
        raise InputError(f"{name} = {path!r} can be read by others; chmod 600 it")
    return text


def _is_secret(text: str) -> bool:
    return _SHORTEST <= len(text) <= _LONGEST and text.isascii() and text.isprintable()
