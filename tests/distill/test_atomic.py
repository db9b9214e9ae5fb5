"""A file has its old contents or its new ones, for whoever looks when."""

import os

import pytest

from ssd_jax.distill import manifest
from ssd_jax.distill.manifest import only_one, write_atomic
from ssd_jax.errors import InputError


def test_new_contents_come_by_renaming_a_file_that_is_whole(tmp_path, monkeypatch):
    path, seen = tmp_path / "file", []
    path.write_bytes(b"old")
    os.link(path, tmp_path / "same")  # would change with it if it were written in place
    replace = manifest.Path.replace
    monkeypatch.setattr(
        manifest.Path,
        "replace",
        lambda self, to: (seen.append(self.read_bytes()), replace(self, to)),
    )
    write_atomic(path, b"new")
    assert (seen, path.read_bytes()) == ([b"new"], b"new")
    assert (tmp_path / "same").read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_is_free_again_after_its_user(tmp_path):
    with (
        only_one(tmp_path),
        pytest.raises(InputError, match="another ssd-jax distill"),
        only_one(tmp_path),
    ):
        pass
    with only_one(tmp_path):
        pass
