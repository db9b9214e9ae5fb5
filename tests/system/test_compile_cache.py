"""Compiled programs on disk: damage heals, and each model's setting holds for what it compiles."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ssd_jax import LLM
from ssd_jax.cli.main import main
from ssd_jax.errors import InputError
from ssd_jax.placement.placement import Placement
from ssd_jax.system import compile_cache
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.compile_cache import (
    ProgramStore,
    open_store,
    settings_in_use,
    store_in_use,
    use_no_cache,
    use_store,
)
from ssd_jax.system.cores import usable_cores
from ssd_jax.system.stored_jit import StoredJit
from tests.system.stored import key_of

PROGRAM = bytes(range(256)) * 40


def _flip(place: int):
    def damage(stored: bytes, _other: bytes) -> bytes:
        at = place % len(stored)
        return stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]

    return damage


DAMAGE = {
    "first bit": _flip(0),
    "a bit within": _flip(5000),
    "last bit": _flip(-1),
    "nothing left": lambda stored, _: b"",
    "cut in its head": lambda stored, _: stored[:20],
    "cut": lambda stored, _: stored[: len(stored) // 2],
    "a byte short": lambda stored, _: stored[:-1],
    "longer": lambda stored, _: stored + b"\0",
    "another's": lambda _, other: other,
}


def in_use() -> Path | None:
    store = store_in_use()
    return None if store is None else store.directory


def programs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.program"))


@pytest.mark.parametrize("kind", DAMAGE)
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


def test_a_cache_directory_that_cannot_be_written_is_read(tmp_path, monkeypatch, caplog):
    ProgramStore(tmp_path).put("key", PROGRAM)
    (entry,) = programs(tmp_path)
    store = open_store(StoreSettings(str(tmp_path)))

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
        open_store(StoreSettings(below))
    monkeypatch.setenv("XDG_CACHE_HOME", below)
    assert open_store(StoreSettings()) is None
    (line,) = caplog.messages
    assert "set XDG_CACHE_HOME" in line
    assert open_store(StoreSettings("off")) is None


SECRET = "0123456789abcdef" * 4


@pytest.fixture
def secret_file(tmp_path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def shared(tmp_path: Path) -> Path:
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_directory_that_others_can_write_is_refused_with_the_remedy(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(InputError, match=r"can be written by others.*chmod 700.*_secret`") as why:
        open_store(StoreSettings(str(tmp_path)))
    assert str(why.value).count(str(tmp_path)) == 2
    tmp_path.chmod(0o755)
    assert open_store(StoreSettings(str(tmp_path))) is not None


def test_a_directory_of_another_user_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match=r"belongs to another user.*another one, or `compile_cac"):
        open_store(StoreSettings(str(tmp_path)))


def test_the_usual_directory_is_not_used_where_others_can_write_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_store(StoreSettings()).directory.stat().st_mode & 0o777 == 0o700
    (tmp_path / "ssd_jax" / "xla").chmod(0o770)
    assert open_store(StoreSettings()) is None
    (line,) = caplog.messages
    assert f"{tmp_path}/ssd_jax/xla can be written by others" in line
    assert "chmod 700" in line


@pytest.mark.parametrize("how", ["others can write it", "another's", "a pipe"])
def test_an_entry_that_others_can_have_written_is_not_read(tmp_path, monkeypatch, caplog, how):
    """Also where it came into the directory after that was opened, with the right checksum."""
    store = ProgramStore(tmp_path)
    store.put("key", PROGRAM)
    (entry,) = programs(tmp_path)
    assert entry.stat().st_mode & 0o777 == 0o600
    if how == "others can write it":
        entry.chmod(0o620)
    elif how == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        entry.unlink()
        os.mkfifo(entry)
    assert store.get("key") is None
    assert not entry.exists()
    assert str(entry) in caplog.text
    monkeypatch.undo()
    store.put("key", PROGRAM)
    assert store.get("key") == PROGRAM


def test_users_who_have_the_secret_share_a_directory(tmp_path, secret_file, monkeypatch):
    settings = StoreSettings(str(shared(tmp_path)), str(secret_file))
    open_store(settings).put("key", PROGRAM)
    (entry,) = programs(Path(settings.compile_cache))
    assert entry.stat().st_mode & 0o044
    store = open_store(settings)
    assert store.settings == settings
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.get("key") == PROGRAM


@pytest.mark.parametrize("secret", ["", "another secret, of anybody"])
def test_an_entry_without_the_hmac_of_the_secret_is_never_read(
    tmp_path, secret, monkeypatch, caplog, no_cache_of_the_user
):
    """Whatever its name is: one that was written for another secret is found by no other."""
    directory = shared(tmp_path)
    forger, store = ProgramStore(directory, secret), ProgramStore(directory, SECRET)
    use_store(forger)
    run_a_program(11)
    (forged,) = programs(directory)
    monkeypatch.setattr(pickle, "loads", lambda _: pytest.fail("it is read"))
    use_store(store)
    run_a_program(11)
    (entry,) = {*programs(directory)} - {forged}
    assert caplog.text == ""
    entry.write_bytes(forged.read_bytes())
    run_a_program(11)
    assert f"{entry} is damaged, or another wrote it" in caplog.text
    assert entry.read_bytes() != forged.read_bytes()


def test_an_entry_under_another_name_is_not_read(tmp_path):
    store = ProgramStore(tmp_path, SECRET)
    store.put("one", PROGRAM)
    store.put("other", PROGRAM[1:])
    one, other = (store._file(key) for key in ("one", "other"))
    one.write_bytes(other.read_bytes())
    assert store.get("one") is None


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("short", 0o600, "no secret of 16 to 1024 printable"),
        (SECRET, 0o640, "can be read by others; chmod 600"),
        (None, 0o600, "cannot be read: No such file"),
    ],
)
def test_a_bad_secret_is_refused_by_name(tmp_path, text, mode, problem):
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(InputError, match=f"compile_cache_secret = '{path}' .*{problem}"):
        open_store(StoreSettings(str(tmp_path / "store"), str(path)))
    assert not (tmp_path / "store").exists()


def test_a_secret_without_a_store_is_refused(secret_file):
    with pytest.raises(InputError, match=r"compile_cache_secret = .* means nothing with"):
        open_store(StoreSettings("off", str(secret_file)))


def test_another_process_gets_the_settings_of_the_store(tmp_path, secret_file):
    assert settings_in_use() == StoreSettings("off")
    settings = StoreSettings(str(shared(tmp_path)), str(secret_file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache._InUse, "store", open_store(settings))
        assert settings_in_use() == settings


def test_the_command_line_refuses_a_bad_cache_before_it_looks_for_the_model(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    flags = ["--target=/nowhere", f"--compile_cache={tmp_path}/file/x", "--prompt=a"]
    assert main(["generate", *flags]) == 2
    stderr = capsys.readouterr().err
    assert "compile_cache" in stderr
    assert "Errno" not in stderr
    assert stderr.count("\n") == 1


def run_a_program(number: int) -> None:
    assert StoredJit(lambda x: x * 2 + number)(jnp.float32(1)) == 2 + number


def test_each_store_takes_what_is_compiled_while_it_is_in_use(tmp_path, no_cache_of_the_user):
    first, second = (
        open_store(StoreSettings(str(tmp_path / name))) for name in ("first", "second")
    )
    assert use_store(first) == first.directory
    run_a_program(1)
    found = programs(first.directory)
    assert found
    use_store(second)
    run_a_program(2)
    assert programs(second.directory)
    assert programs(first.directory) == found
    use_store(None)
    run_a_program(3)
    use_store(first)
    use_no_cache()
    run_a_program(4)
    assert programs(first.directory) == found
    use_store(first)
    assert in_use() == first.directory
    run_a_program(5)
    assert len(programs(first.directory)) > len(found)


def test_the_users_own_cache_stays_but_where_none_may_be_used(tmp_path, no_cache_of_the_user):
    path, store = tmp_path / "own", open_store(StoreSettings(str(tmp_path / "ours")))
    jax.config.update("jax_compilation_cache_dir", str(path))
    assert use_store(store) == path
    run_a_program(6)
    found = len(list(path.iterdir()))
    assert found
    use_no_cache()
    run_a_program(7)
    assert len(list(path.iterdir())) == found
    assert use_store(None) == path
    run_a_program(8)
    assert len(list(path.iterdir())) > found
    assert programs(store.directory) == []


def test_an_entry_that_is_no_program_is_compiled_again_and_stored(tmp_path, no_cache_of_the_user):
    store = ProgramStore(tmp_path)
    use_store(store)
    run_a_program(9)
    (entry,) = programs(tmp_path)
    store.put(key_of(entry), b"no program")
    run_a_program(9)
    assert store.get(key_of(entry)) != b"no program"


def test_each_model_has_its_own_setting(tiny_checkpoint, tmp_path, no_cache_of_the_user):
    """One process, two models: the later one's cache does not take what the earlier compiles."""
    small = {"dtype": "float32", "context": 64}
    one = LLM(str(tiny_checkpoint), load=False, compile_cache=str(tmp_path / "one"), **small)
    two = LLM(str(tiny_checkpoint), load=False, compile_cache=str(tmp_path / "two"), **small)
    assert in_use() == tmp_path / "two"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd_jax.llm.llm.load", lambda *_args, **_kwargs: pytest.fail(str(in_use())))
        with pytest.raises(pytest.fail.Exception, match=str(tmp_path / "one")):
            one.load()
        with pytest.raises(pytest.fail.Exception, match=str(tmp_path / "two")):
            two.load()
    LLM(str(tiny_checkpoint), load=False, compile_cache="off", **small)
    assert in_use() is None


def test_a_part_of_a_tpu_switches_every_cache_off(
    tiny_checkpoint, tmp_path, monkeypatch, caplog, no_cache_of_the_user
):
    path = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(path))
    monkeypatch.setattr(Placement, "cacheable", property(lambda _: False))
    LLM(str(tiny_checkpoint), load=False, dtype="float32", compile_cache=str(tmp_path / "ours"))
    run_a_program(10)
    assert not path.exists() or not list(path.iterdir())
    assert sum("38004" in line for line in caplog.messages) == 1


def test_entries_unused_for_a_month_are_deleted_when_another_is_put(tmp_path):
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


def test_a_line_says_that_a_directory_is_not_used(tiny_checkpoint, tmp_path, caplog):
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
        before = [path.read_bytes() for path in paths]
        assert len(paths) > 5
        for number, path in enumerate(paths):
            damage = kinds[(number + damaged) % len(kinds)]
            path.write_bytes(damage(before[number], before[number - 1]))
        assert start(tmp_path, tiny_checkpoint) == expected
        assert programs(tmp_path) == paths
        store = ProgramStore(tmp_path)
        assert all(store.get(key_of(path)) for path in paths)
        damaged += len(paths)


COMPILE = """
import sys
import jax, jax.numpy as jnp
from ssd_jax.devices.programs import lookup
from ssd_jax.devices.programs.program_spec import ProgramSpec
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.compile_cache import open_store, use_store
from ssd_jax.system.cores import pin
directory, when = sys.argv[1:]
lookup._IMPORTED += 600
restore = pin({CORE}) if when == "pinned until it starts" else lambda: None
jax.devices()
restore()
if when == "pinned":
    pin({CORE})
use_store(open_store(StoreSettings(directory)))
struct = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
spec = ProgramSpec(lambda x, y: jnp.sin(x) * jnp.cos(y), (struct, struct), cache_key="it")
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
    before = programs(tmp_path)
    assert len(before) == 2  # the program, and what finds it
    assert parts("pinned until it starts") == 0
    assert programs(tmp_path) == before
    assert parts("anywhere") > 0
    assert len(programs(tmp_path)) == 2 * len(before)
