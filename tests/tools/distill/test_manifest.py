"""A stage's manifest comes back as it was written, or says what to do."""

import dataclasses
import json
import re

import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.manifest import (
    MANIFEST,
    Manifest,
    lock_directory,
    read_manifest,
    write_manifest,
)

WRITTEN = Manifest(stage="train", settings={"a.b": 1}, inputs={"target": "t"}, data={"step": 3})


def test_a_manifest_is_read_back(tmp_path):
    assert read_manifest(tmp_path) is None
    for finished in (False, True):
        manifest = dataclasses.replace(WRITTEN, finished=finished)
        write_manifest(tmp_path, manifest)
        assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not readable JSON"),
        (lambda _: "[]", "holds a JSON list"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2 is not supported"),
        (lambda text: text.replace('"inputs"', '"input"'), "is damaged: no usable inputs in it"),
        (lambda text: json.dumps(json.loads(text) | {"data": []}), "no usable data in it"),
    ],
)
def test_an_unusable_manifest_names_the_remedy(tmp_path, change, message):
    write_manifest(tmp_path, WRITTEN)
    path = tmp_path / MANIFEST
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError) as error:
        read_manifest(tmp_path)
    line = str(error.value)
    assert re.search(f"^{re.escape(str(path))}.* {re.escape(message)}", line)
    assert line.endswith(f"; remove {tmp_path} to make it again")


def test_a_directory_is_free_again_after_its_user(tmp_path):
    with (
        lock_directory(tmp_path),
        pytest.raises(InputError, match="another ssd-jax distill"),
        lock_directory(tmp_path),
    ):
        pass
    with lock_directory(tmp_path):
        pass
