"""Paths that users give."""

import tempfile
from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.system.paths import require_writable, user_path


def test_a_path_is_that_of_the_user():
    assert user_path("a/b") == Path("a/b")
    assert user_path("~/b") == Path.home() / "b"


@pytest.mark.parametrize(
    ("text", "message"),
    [("~no-one/x", "~no-one has no home directory; give the whole"), ("a\0b", "no path has")],
)
def test_an_impossible_path_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        user_path(text)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_path_that_can_be_written_is_left_as_it_is(tmp_path, replaced):
    there = tmp_path / "there"
    there.write_text("text")
    for path in (there, tmp_path, tmp_path / "new", tmp_path / "new" / "directory" / "file"):
        require_writable("out", path, atomic=replaced)
    assert there.read_text() == "text"
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/null", "out = '/dev/null' is a device or a pipe; give a file"),
        ("/dev/null/x/y", "out = '/dev/null/x/y' cannot be written: Not a directory; give"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(path, message, replaced):
    with pytest.raises(InputError, match=message):
        require_writable("out", Path(path), atomic=replaced)


def test_the_directory_of_the_file_is_tested_for_writing(tmp_path, monkeypatch):
    tried = []

    def denied(dir):
        tried.append(dir)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    there = tmp_path / "there"
    there.write_text("text")
    require_writable("history", there)  # it is appended to
    for path, replaced, place in (
        (there, True, tmp_path),
        (tmp_path, False, tmp_path),
        (tmp_path, True, tmp_path.parent),
        (tmp_path / "new" / "file", False, tmp_path),
    ):
        with pytest.raises(InputError, match="Permission denied; give another place"):
            require_writable("out", path, atomic=replaced)
        assert tried.pop() == place
