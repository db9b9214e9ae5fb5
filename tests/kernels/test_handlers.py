"""Handlers in C++: compiled once into the cache, and what happens where they cannot be."""

import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd_jax.kernels import handlers
from ssd_jax.testing import tiny

TINY = """
#include "xla/ffi/api/ffi.h"
static xla::ffi::Error Nothing() { return xla::ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(%s, Nothing, xla::ffi::Ffi::Bind());
"""

needs_compiler = pytest.mark.skipif(handlers.why_missing() is not None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small handler, named after the test's directory, and a cache of its own."""
    monkeypatch.setattr(handlers, "cache_dir", lambda: tmp_path / "cache")
    path = tmp_path / "small" / "cpu.cc"
    path.parent.mkdir()
    path.write_text(TINY % f"nothing_{tmp_path.name}".replace("-", "_"))
    return path


@pytest.fixture
def plain(tmp_path):
    """A source without XLA's headers, which take most of a compile."""
    path = tmp_path / "plain.cc"
    path.write_text('extern "C" int nothing() { return 0; }\n')
    return path


def why_missing(source):
    return handlers.why_missing(
        (source,), (f"nothing_{source.parent.parent.name}".replace("-", "_"),)
    )


@pytest.mark.more
@needs_compiler
def test_the_library_is_compiled_once(source, tmp_path):
    assert why_missing(source) is None
    assert handlers.why_not_cached((source,)) is None
    [library] = (tmp_path / "cache" / "kernels").iterdir()
    assert library.parent.stat().st_mode & 0o777 == 0o700
    before = library.stat().st_mtime_ns
    assert handlers.build([source], library.parent) == library
    assert library.stat().st_mtime_ns == before


@pytest.mark.more
@needs_compiler
def test_threads_that_ask_at_once_build_and_register_it_once(source, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("no directory")  # else a second build finds the first
    builds, compiled = [], handlers._compile
    both = threading.Barrier(2, timeout=2)

    def counted(*args):
        builds.append(args)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        return compiled(*args)

    monkeypatch.setattr(handlers, "_compile", counted)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(why_missing, [source, source])) == [None, None]
    assert len(builds) == 1


@needs_compiler
@pytest.mark.parametrize("changed", ["source", "processor", "headers"])
def test_each_source_processor_and_jaxlib_has_its_own(plain, tmp_path, monkeypatch, changed):
    first = handlers.build([plain], tmp_path)
    if changed == "source":
        plain.write_text(plain.read_text() + "\n")
    elif changed == "processor":
        monkeypatch.setattr(handlers, "processor", lambda: "flags: of another")
    else:
        monkeypatch.setattr(handlers, "jaxlib_version", "9.9")
    assert handlers.build([plain], tmp_path) != first


@pytest.mark.more
@needs_compiler
def test_a_cache_that_cannot_be_used_is_done_without(source, tmp_path):
    (tmp_path / "cache").write_text("no directory")
    assert why_missing(source) is None
    unkept = handlers.why_not_cached((source,))
    assert unkept == f"{tmp_path}/cache/kernels cannot be used: Not a directory"


@needs_compiler
def test_nothing_is_compiled_for_a_directory_that_cannot_be_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(handlers, "_compile", None)
    with pytest.raises(FileNotFoundError):
        handlers.build([source], tmp_path / "nowhere")


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: data[:999], lambda data: data[:-1] + b"?"])
def test_a_damaged_library_is_compiled_again(plain, tmp_path, damage):
    library = handlers.build([plain], tmp_path)
    sound = library.read_bytes()
    library.write_bytes(damage(sound))
    again = handlers.build([plain], tmp_path)
    assert again.read_bytes() == sound
    assert [*tmp_path.glob("*.so")] == [again]
    before = again.stat().st_mtime_ns
    assert handlers.build([plain], tmp_path).stat().st_mtime_ns == before


def test_without_a_compiler_a_line_says_so(source, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_missing(source) == "there is no C++ compiler (c++, g++, clang++)"


@needs_compiler
def test_without_a_compiler_what_another_start_has_compiled_is_used(source, tmp_path, monkeypatch):
    monkeypatch.setattr(handlers, "_compile", lambda *_: b"a library")
    library = handlers.build([source], tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert handlers.build([source], tmp_path) == library
    monkeypatch.setattr(handlers, "processor", lambda: "flags: of another")
    with pytest.raises(handlers.BuildError, match="there is no C"):
        handlers.build([source], tmp_path)


def test_a_compiler_that_fails_is_quoted(source, tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ntest "$1" = --version || { echo "no such luck" >&2; exit 1; }\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "no such luck" in why_missing(source)


@needs_compiler
def test_a_source_that_does_not_compile_is_no_error_of_the_users(source):
    source.write_text("int x = ;")
    assert "error" in why_missing(source)


@needs_compiler
def test_the_error_in_a_header_is_quoted(source):
    source.with_name("first.h").write_text('#include "second.h"\n')
    source.with_name("second.h").write_text("int x = ;\n")
    source.write_text('#include "first.h"\n')
    assert "second.h:1:9: error: expected" in why_missing(source)


@pytest.mark.more
def test_without_a_compiler_texts_are_generated_all_the_same(tmp_path):
    """XLA's products stand in, and one line says so."""
    checkpoint = tmp_path / "tiny"
    tiny.write_checkpoint(checkpoint)
    command = Path(sys.executable).with_name("ssd-jax")
    done = subprocess.run(
        [command, "generate", f"--target={checkpoint}", "--mode=sd", "--draft=ngram",
         "--prompt=a", "--max_tokens=4", "--context=64", "--compile_cache=off"],
        env=os.environ | {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = "products and attention are XLA's, which is slower here: there is no C++ compiler"
    assert done.stderr.count(line) == 1
    assert "Traceback" not in done.stderr
