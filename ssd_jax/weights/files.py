"""Small file helpers that explain what is wrong with a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError


def read_json(path: Path, *, remedy: str = "get the file again") -> dict[str, Any]:
    """The object in a JSON file.

    Args:
      path: the file.
      remedy: what to do about a damaged one, for the error.

    Raises:
      InputError: missing, not to be read, not JSON, or not an object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            value = json.load(file)
    except PermissionError:
        raise _no_permission(path) from None
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; the checkpoint is incomplete") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not readable JSON: {error}; {remedy}") from None
    if not isinstance(value, dict):
        found = type(value).__name__
        raise InputError(f"{path} holds a JSON {found}, expected an object; {remedy}")
    return value


def require_readable(path: Path) -> None:
    """Refuses a file that this user may not read.

    Raises:
      InputError: no permission.
    """
    try:
        with path.open("rb"):
            pass
    except PermissionError:
        raise _no_permission(path) from None


def _no_permission(path: Path) -> InputError:
    return InputError(
        f"no permission to read {path}; give this user access to it (chmod, chown) or get the "
        "checkpoint as this user"
    )


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
