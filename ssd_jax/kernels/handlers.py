"""Handlers for XLA's CPU backend, written in C++: compiled at first use with the system's compiler.

The library is kept in the package's cache. Its name consists of everything that it depends on: the
sources, the version of XLA's headers, the processor and the compiler, so that machines can share a
cache; and of its own digest, so that a damaged library is compiled again. Without a compiler, a
library made by any compiler is used.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from jaxlib.version import __version__ as jaxlib_version

from ssd_jax.system.atomic import write_file
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.system.environment import processor

PRODUCTS, TAKE = "ssd_jax_linear_products", "ssd_jax_linear_take"
EXPERT_PRODUCTS = "ssd_jax_linear_expert_products"
ATTENTION = "ssd_jax_tree_attention"
THRESHOLDS = "ssd_jax_thresholds"
"""Handlers, by the names under which XLA knows them."""

_DIRECTORY = Path(__file__).parent
SOURCES = tuple(_DIRECTORY / name / "cpu.cc" for name in ("linear", "tree_attention", "verify"))
COMPILERS = ("c++", "g++", "clang++")
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_NATIVE = "-march=native" if _X86 else "-mcpu=native"
_FLAGS = (_NATIVE, "-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-w")
_TIMEOUT_S = 600.0
_ERROR = re.compile(r":\d+: (fatal )?error: ")
_BUILD_LOCK = threading.Lock()  # two threads would build, and register, twice


class BuildError(Exception):
    """There is no library; the message is one line."""


def why_missing(
    sources: tuple[Path, ...] = SOURCES,
    names: tuple[str, ...] = (PRODUCTS, TAKE, EXPERT_PRODUCTS, ATTENTION, THRESHOLDS),
) -> str | None:
    """None once the handlers are registered; else, in one line, why they cannot be.

    Compiles them if no earlier start has, which takes some seconds.
    """
    with _BUILD_LOCK:
        return _why_missing(sources, names)


@functools.cache
def _why_missing(sources: tuple[Path, ...], names: tuple[str, ...]) -> str | None:
    try:
        library, _ = _library(sources)
    except (BuildError, OSError, RuntimeError) as error:
        return " ".join(str(error).split())
    for name in names:
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return None


def why_not_cached(sources: tuple[Path, ...] = SOURCES) -> str | None:
    """None if later starts will find what this one compiled; else, in one line, why not.

    Only valid if `why_missing` is None.
    """
    return _library(sources)[1]


@functools.cache
def _library(sources: tuple[Path, ...]) -> tuple[ctypes.CDLL, str | None]:
    """The library from the cache; if that cannot be used, from a temporary directory, with the
    reason."""
    try:
        directory = cache_dir() / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # its content will be run
        return ctypes.CDLL(str(build(sources, directory))), None
    except OSError as error:
        with tempfile.TemporaryDirectory() as scratch:
            library = ctypes.CDLL(str(build(sources, Path(scratch))))
        path = error.filename or "the cache"
        return library, f"{path} cannot be used: {error.strerror or error}"


def build(sources: Sequence[Path], directory: Path) -> Path:
    """The compiled library in a directory; it is built if it is missing or damaged.

    Raises:
      BuildError: there is no library and no compiler, or the compiler fails.
      OSError: the directory cannot be written.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    sources_digest = _sources_digest(sources)
    compiler_digest = None if compiler is None else _digest(_run(compiler, "--version").encode())
    for path in sorted(directory.glob(f"handlers-{sources_digest}-{compiler_digest or '*'}-*.so")):
        if path.stem.endswith(f"-{_digest(path.read_bytes())}"):
            return path
        path.unlink(missing_ok=True)
    if compiler is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    tempfile.TemporaryFile(dir=directory).close()  # fail before compiling if it cannot be written
    library = _compile(sources, compiler)
    path = directory / f"handlers-{sources_digest}-{compiler_digest}-{_digest(library)}.so"
    write_file(path, library)
    return path


def _compile(sources: Sequence[Path], compiler: str) -> bytes:
    headers = f"-isystem{jax.ffi.include_dir()}"
    with tempfile.TemporaryDirectory() as scratch:
        objects = [f"{scratch}/{index}.o" for index in range(len(sources))]

        def compile_one(source: Path, output: str) -> None:
            _run(compiler, *_FLAGS, headers, "-c", str(source), "-o", output)

        with ThreadPoolExecutor() as pool:  # the compiler uses one core a source
            list(pool.map(compile_one, sources, objects))
        library = Path(scratch) / "library.so"
        _run(compiler, *_FLAGS, "-shared", *objects, "-o", str(library))
        return library.read_bytes()


def _sources_digest(sources: Sequence[Path]) -> str:
    texts = [path.read_text() for path in (*sources, *sorted(_DIRECTORY.rglob("*.h")))]
    return _digest("\0".join((*texts, *_FLAGS, jaxlib_version, processor())).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _run(*command: str) -> str:
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if process.returncode:
        lines = (process.stderr.strip() or f"exit status {process.returncode}").splitlines()
        raise BuildError(f"{command[0]}: {next(filter(_ERROR.search, lines), lines[0])}")
    return process.stdout
