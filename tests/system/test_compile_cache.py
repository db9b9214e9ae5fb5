"""Compiled programs on disk: damage heals, and each model's setting holds for what it compiles."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from ssd_jax import LLM
from ssd_jax.cli.main import main
from ssd_jax.errors import InputError
from ssd_jax.placement.placement import Placement
from ssd_jax.system import compile_cache
from ssd_jax.system.compile_cache import (
    ProgramStore,
    keep_nothing,
    keep_programs,
    kept_in,
    open_store,
)
from ssd_jax.system.cores import usable_cores

PROGRAM = bytes(range(256)) * 40


def _flip(place: int):
    def damage(kept: bytes, _other: bytes) -> bytes:
        at = place % len(kept)
        return kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :]

    return damage


def _inside(kept: bytes, _other: bytes) -> bytes:
    """The envelope is whole, what is in it is not."""
    digest, packed = kept[:32], kept[32:]
    program = bytearray(compilation_cache.decompress_executable(packed))
    program[len(program) // 2 :: 97] = b"\xa5" * len(program[len(program) // 2 :: 97])
    return digest + compilation_cache.compress_executable(bytes(program))


DAMAGE = {
    "first bit": _flip(0),
    "a bit within": _flip(5000),
    "last bit": _flip(-1),
    "nothing left": lambda kept, _: b"",
    "cut in its head": lambda kept, _: kept[:20],
    "cut": lambda kept, _: kept[: len(kept) // 2],
    "a byte short": lambda kept, _: kept[:-1],
    "longer": lambda kept, _: kept + b"\0",
    "another's": lambda _, other: other,
    "inside its envelope": _inside,
}


def key_of(path: Path) -> str:
    return re.sub(r"(-\d+-cores)?\.program$", "", path.name)


def programs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.program"))


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind != "inside its envelope"])
def test_a_damaged_entry_is_as_if_absent_and_can_be_put_again(tmp_path, kind):
    store = ProgramStore(tmp_path)
    store.put("jit_a-12", PROGRAM)
    store.put("jit_b-34", PROGRAM)
    entry, other = programs(tmp_path)
    assert store.get("jit_a-12") == PROGRAM
    entry.write_bytes(DAMAGE[kind](entry.read_bytes(), other.read_bytes()))
    assert store.get("jit_a-12") is None
    assert not entry.exists()
    store.put("jit_a-12", PROGRAM)
    assert store.get("jit_a-12") == store.get("jit_b-34") == PROGRAM
    assert store.get("jit_c-56") is None


def test_a_disk_that_is_full_keeps_nothing_half_and_is_mentioned_once(
    tmp_path, monkeypatch, caplog
):
    store = ProgramStore(tmp_path)

    def full(path: Path, _to: Path):
        assert path.read_bytes()
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(Path, "replace", full)
    store.put("key", PROGRAM)
    store.put("other", PROGRAM)
    assert list(tmp_path.iterdir()) == []
    (line,) = caplog.messages
    assert "No space left" in line
    assert "set XDG_CACHE_HOME" in line
    assert "`compile_cache='off'`" in line
    monkeypatch.undo()
    store.put("key", PROGRAM)
    assert store.get("key") == PROGRAM


def test_a_directory_that_cannot_be_written_is_read(tmp_path, monkeypatch, caplog):
    ProgramStore(tmp_path).put("key", PROGRAM)
    (entry,) = programs(tmp_path)
    store = open_store(str(tmp_path))

    def refused(*_args, **_kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(compile_cache, "write_file", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    assert store.get("key") == PROGRAM
    store.put("other", PROGRAM)
    entry.write_bytes(b"damaged")
    assert store.get("key") is None
    assert [line for line in caplog.messages if "Read-only" in line] == [caplog.messages[0]]


def test_a_directory_that_cannot_be_is_refused_where_it_was_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "below")
    with pytest.raises(InputError, match=r"compile_cache = .*below.* cannot be used \(.*file.*off"):
        open_store(below)
    monkeypatch.setenv("XDG_CACHE_HOME", below)
    assert open_store("auto") is None
    (line,) = caplog.messages
    assert "set XDG_CACHE_HOME" in line
    assert open_store("off") is None


def test_the_command_line_says_so_before_it_looks_for_the_model(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    flags = ["--target=/nowhere", f"--compile_cache={tmp_path}/file/x", "--prompt=a"]
    assert main(["generate", *flags]) == 2
    said = capsys.readouterr().err
    assert "compile_cache" in said
    assert "Errno" not in said
    assert said.count("\n") == 1


def run_a_program(number: int) -> None:
    assert jax.jit(lambda x: x * 2 + number)(jnp.float32(1)) == 2 + number


def test_each_store_takes_what_is_compiled_while_it_is_in_use(tmp_path, no_cache_of_the_user):
    first, second = (open_store(str(tmp_path / name)) for name in ("first", "second"))
    assert keep_programs(first) == first.directory
    run_a_program(1)
    found = programs(first.directory)
    assert found
    keep_programs(second)
    run_a_program(2)
    assert programs(second.directory)
    assert programs(first.directory) == found
    keep_programs(None)
    run_a_program(3)
    keep_programs(first)
    keep_nothing()
    run_a_program(4)
    assert programs(first.directory) == found
    keep_programs(first)
    assert kept_in() == first.directory
    run_a_program(5)
    assert len(programs(first.directory)) > len(found)


def test_the_users_own_cache_stays_but_where_none_may_be_used(tmp_path, no_cache_of_the_user):
    own, store = tmp_path / "own", open_store(str(tmp_path / "ours"))
    jax.config.update("jax_compilation_cache_dir", str(own))
    assert keep_programs(store) == own
    run_a_program(6)
    found = len(list(own.iterdir()))
    assert found
    keep_nothing()
    run_a_program(7)
    assert len(list(own.iterdir())) == found
    assert keep_programs(None) == own
    run_a_program(8)
    assert len(list(own.iterdir())) > found
    assert programs(store.directory) == []


def test_a_damaged_program_is_compiled_again_and_kept(tmp_path, no_cache_of_the_user):
    keep_programs(ProgramStore(tmp_path))
    run_a_program(9)
    kept = {path: path.read_bytes() for path in programs(tmp_path)}
    for path, whole in kept.items():
        path.write_bytes(_inside(whole, b""))
    jax.clear_caches()
    run_a_program(9)
    store = ProgramStore(tmp_path)
    assert all(store.get(key_of(path)) for path in kept)


def test_each_model_has_its_own_setting(tiny_checkpoint, tmp_path, no_cache_of_the_user):
    """One process, two models: the later one's cache does not take what the earlier compiles."""
    small = {"dtype": "float32", "context": 64}
    one = LLM(str(tiny_checkpoint), load=False, compile_cache=str(tmp_path / "one"), **small)
    two = LLM(str(tiny_checkpoint), load=False, compile_cache=str(tmp_path / "two"), **small)
    assert kept_in() == tmp_path / "two"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd_jax.llm.llm.load", lambda *_args, **_kwargs: pytest.fail(str(kept_in())))
        with pytest.raises(pytest.fail.Exception, match=str(tmp_path / "one")):
            one.load()
        with pytest.raises(pytest.fail.Exception, match=str(tmp_path / "two")):
            two.load()
    LLM(str(tiny_checkpoint), load=False, compile_cache="off", **small)
    assert kept_in() is None


def test_a_part_of_a_tpu_switches_every_cache_off(
    tiny_checkpoint, tmp_path, monkeypatch, caplog, no_cache_of_the_user
):
    own = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    monkeypatch.setattr(Placement, "cacheable", property(lambda _: False))
    LLM(str(tiny_checkpoint), load=False, dtype="float32", compile_cache=str(tmp_path / "ours"))
    run_a_program(10)
    assert not own.exists() or not list(own.iterdir())
    assert sum("38004" in line for line in caplog.messages) == 1


def test_what_nobody_used_for_a_month_is_deleted_when_something_new_is_put(tmp_path):
    store = ProgramStore(tmp_path)
    for key in ("used", "unused", "young"):
        store.put(key, PROGRAM)
    (tmp_path / ".new.program.0a1b2c3d.partial").write_bytes(PROGRAM)
    (tmp_path / ".now.program.0a1b2c3d.partial").write_bytes(PROGRAM)
    others = {"notes", "film.partial", ".film.mp4.0a1b2c3d.partial"}
    for name in others:
        (tmp_path / name).write_bytes(PROGRAM)
    days = dict.fromkeys(others, 99) | {".new.program.0a1b2c3d.partial": 2}
    days |= {store._file("used").name: 31, store._file("unused").name: 31}
    for name, age in {**days, store._file("young").name: 29}.items():
        then = time.time() - age * 86_400
        os.utime(tmp_path / name, (then, then))
    later = ProgramStore(tmp_path)
    assert later.get("used") == PROGRAM
    later.put("new", PROGRAM)
    left = {path.name for path in tmp_path.iterdir()}
    programs = {store._file(key).name for key in ("used", "young", "new")}
    assert left == {*programs, *others, ".now.program.0a1b2c3d.partial"}


def test_a_directory_that_is_not_used_is_said(tiny_checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        LLM(str(tiny_checkpoint), load=False, dtype="float32", compile_cache=str(tmp_path))
    assert any("jax_compilation_cache_dir" in line for line in caplog.messages)


START = """
import json, sys
from ssd_jax import LLM, SamplingParams
directory, target = sys.argv[1:]
settings = {"mode": "sd", "draft": "ngram", "k": "1", "dtype": "bfloat16", "context": 64}
with LLM(target, compile_cache=directory, **settings) as llm:
    out = llm.generate("some text some text", SamplingParams(max_tokens=8, ignore_eos=True))
print(json.dumps(out[0].token_ids))
"""


def start(directory: Path, target: Path) -> list[int]:
    command = [sys.executable, "-c", START, str(directory), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.more
@pytest.mark.parametrize("entries", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_starts_with_damaged_entries_give_the_same_ids_and_heal_them(
    tiny_checkpoint, tmp_path, entries
):
    """Every entry of a start is damaged, each in another way than at the start before."""
    expected = start(tmp_path, tiny_checkpoint)
    kinds, damaged = list(DAMAGE.values()), 0
    while damaged < entries:
        paths = programs(tmp_path)
        kept = [path.read_bytes() for path in paths]
        assert len(paths) > 5
        for number, path in enumerate(paths):
            damage = kinds[(number + damaged) % len(kinds)]
            path.write_bytes(damage(kept[number], kept[number - 1]))
        assert start(tmp_path, tiny_checkpoint) == expected
        assert programs(tmp_path) == paths
        store = ProgramStore(tmp_path)
        assert all(store.get(key_of(path)) for path in paths)
        damaged += len(paths)


COMPILE = """
import sys
import jax, jax.numpy as jnp
from ssd_jax.devices import kept_programs
from ssd_jax.devices.program_spec import ProgramSpec
from ssd_jax.system.compile_cache import keep_programs, open_store
from ssd_jax.system.cores import pin
directory, when = sys.argv[1:]
kept_programs._IMPORTED += 600
restore = pin({CORE}) if when == "pinned until it starts" else lambda: None
jax.devices()
restore()
if when == "pinned":
    pin({CORE})
keep_programs(open_store(directory))
struct = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
spec = ProgramSpec(lambda x, y: jnp.sin(x) * jnp.cos(y), (struct, struct), made_from="it")
print(spec.compile(None, ("it",)).as_text().count('"outer_dimension_partitions":["'))
"""


@pytest.mark.more
@pytest.mark.skipif(len(usable_cores()) < 2, reason="there is one core")
def test_programs_that_one_core_compiled_do_not_serve_several(tmp_path):
    """XLA divides loops of what it compiles for a processor among the cores that it finds."""

    def parts(when):
        code = COMPILE.replace("CORE", str(min(usable_cores())))
        command = [sys.executable, "-c", code, str(tmp_path), when]
        env = {**os.environ, "XLA_FLAGS": ""}  # several devices would have as many threads
        done = subprocess.run(command, env=env, capture_output=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert parts("pinned") == 0
    kept = programs(tmp_path)
    assert len(kept) == 2  # JAX's, and what finds it
    assert parts("pinned until it starts") == 0
    assert programs(tmp_path) == kept
    assert parts("anywhere") > 0
    assert len(programs(tmp_path)) == 2 * len(kept)
