"""A file has its old contents or its new ones, for whoever looks when."""

import errno
import os
import sys
from pathlib import Path

import pytest

from ssd_jax.system import atomic
from ssd_jax.system.atomic import clear_partial, new_directory, new_file, write_file


@pytest.mark.parametrize("durable", [False, True])
def test_new_contents_come_by_renaming_a_file_that_is_whole(tmp_path, monkeypatch, durable):
    path, seen, synced = tmp_path / "file", [], []
    path.write_bytes(b"old")
    os.link(path, tmp_path / "same")  # would change with it if it were written in place
    replace, sync = Path.replace, os.fsync
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (seen.append(self.read_bytes()), replace(self, to))
    )
    monkeypatch.setattr(os, "fsync", lambda to: (synced.append(os.fstat(to).st_ino), sync(to)))
    write_file(path, b"new", durable=durable)
    assert (seen, path.read_bytes()) == ([b"new"], b"new")
    assert synced == ([path.stat().st_ino, tmp_path.stat().st_ino] if durable else [])
    assert (tmp_path / "same").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half():
        with new_file(path) as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert [(entry, entry.read_bytes()) for entry in tmp_path.iterdir()] == [(path, b"old")]


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_directory_takes_the_place_of_the_one_before(tmp_path, monkeypatch, at_once, durable):
    if not at_once:
        monkeypatch.setattr(atomic, "_exchange", lambda *_names: False)
    path = tmp_path / "above" / "directory"
    for number in range(2):
        with new_directory(path, durable=durable) as partial:
            (partial / "below").mkdir()
            (partial / "below" / str(number)).write_text("")
            assert path.exists() == bool(number)
    assert [entry.name for entry in (path / "below").iterdir()] == ["1"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="there are two renames")
def test_a_directory_that_is_replaced_is_always_there(tmp_path, monkeypatch):
    path = tmp_path / "directory"
    path.mkdir()
    with new_directory(path) as partial:
        (partial / "file").write_text("new")
        monkeypatch.setattr(Path, "rename", None)  # would leave none of that name for a while
    assert (path / "file").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_directory_and_nothing_else(tmp_path):
    path = tmp_path / "directory"
    path.mkdir()

    def write_half():
        with new_directory(path) as partial:
            (partial / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == [path]
    assert not list(path.iterdir())


def test_the_next_writer_of_a_directory_removes_what_a_killed_one_left(tmp_path):
    path, other = tmp_path / "a", tmp_path / ".a.b.0123abcd.partial"
    other.mkdir()
    (tmp_path / ".a.0123abcd.partial" / "half").mkdir(parents=True)
    with new_directory(path) as partial:
        assert sorted(tmp_path.iterdir()) == sorted([partial, other])
        (partial / "file").write_text("first")
        with new_directory(path) as another:  # at once: neither removes the other's
            (another / "file").write_text("second")
        assert (path / "file").read_text() == "second"
        assert (partial / "file").exists()
    assert (path / "file").read_text() == "first"
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


def test_a_directory_has_its_lock_before_its_name(tmp_path, monkeypatch):
    """Or another writer would take it for abandoned."""
    seen, rename = [], Path.rename

    def looked(path, target):
        seen.append((path.suffix, target.suffix))
        with new_directory(tmp_path / "a"):
            assert path.is_dir()
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, target: [patch.undo(), looked(path, target)][1])
        with new_directory(tmp_path / "a") as partial:
            assert partial.is_dir()
    assert seen == [(".new", ".partial")]
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    for name in (".a.0123abcd.partial", ".a.b.0123abcd.partial", ".a.0123abcd.old", "a.partial"):
        (tmp_path / name).write_text("")
    (tmp_path / ".c.0123abcd.partial").mkdir()
    clear_partial(tmp_path)
    clear_partial(tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.0123abcd.old", "a.partial"]


def test_files_have_the_mode_that_the_user_asked_for(tmp_path):
    before = os.umask(0o027)
    try:
        write_file(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("written", ["file", "directory"])
def test_an_error_of_an_open_file_gets_its_name(tmp_path, written):
    path = tmp_path / written
    full = OSError(errno.ENOSPC, "No space left on device")

    def write():
        with (new_file if written == "file" else new_directory)(path):
            raise full

    with pytest.raises(OSError, match="No space left") as raised:
        write()
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(path))


def test_a_link_to_a_directory_stays_and_the_directory_is_written(tmp_path):
    link, disk = tmp_path / "out", tmp_path / "disk"
    (disk / "out").mkdir(parents=True)
    link.symlink_to(disk / "out")
    (disk / ".out.0123abcd.partial").mkdir()
    with new_directory(link) as partial:
        (partial / "file").write_text("new")
    assert link.is_symlink()
    assert (disk / "out" / "file").read_text() == "new"
    assert [*disk.iterdir()] == [disk / "out"]
    assert sorted(tmp_path.iterdir()) == [disk, link]
