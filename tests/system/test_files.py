"""Reading files of others."""

from __future__ import annotations

import gzip
import json
import socket
from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.system import files

MEMORY = Path("/proc/self/mem")  # a regular file that cannot be read


def read_all(path):
    """What each reader says of a file."""
    for read in (
        files.read_bytes,
        files.read_text,
        files.read_json,
        files.sha256_of,
        lambda path: list(files.read_lines(path, remedy="give another file")),
        files.open_regular,
    ):
        with pytest.raises(InputError) as error:
            read(path)
        yield str(error.value)


def test_a_path_that_is_no_regular_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for path, kind in (
            (Path("socket"), "a socket"),
            (tmp_path, "a directory"),
            (Path("/dev/null"), "a device"),
        ):
            for words in read_all(path):
                assert words == f"{path} is {kind}; give a regular file"


@pytest.mark.skipif(not MEMORY.exists(), reason="needs a file that cannot be read")
def test_an_error_of_the_disk_is_bad_input_that_names_the_file():
    for read in (files.read_bytes, files.read_text, files.read_json, files.sha256_of):
        with pytest.raises(InputError, match="/proc/self/mem cannot be read: Input/output error"):
            read(MEMORY)
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read: Input/output error"):
        list(files.read_lines(MEMORY, remedy="give another file"))


def test_a_file_that_is_missing_or_anothers_is_named_with_what_to_do(tmp_path, monkeypatch):
    for words in read_all(tmp_path / "none"):
        assert words.startswith(f"{tmp_path / 'none'} does not exist; g")

    def denied(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "mine").write_text("{}")
    monkeypatch.setattr(Path, "open", denied)
    for words in read_all(tmp_path / "mine"):
        assert words.startswith(f"no permission to read {tmp_path / 'mine'}; give this user access")


def test_files_have_a_limit_of_size(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, max_bytes=5) == b"12345"
    with pytest.raises(InputError, match="a has more than 4 bytes, which is the limit; mend it"):
        files.read_bytes(path, max_bytes=4, remedy="mend it")


def test_json_has_a_limit_of_depth():
    deepest = "[" * files.MAX_DEPTH + "]" * files.MAX_DEPTH
    assert files.parse_json(deepest) == json.loads(deepest)
    for text in (f"[{deepest}]", '{"a":' * 101 + "1" + "}" * 101, "[" * 10**6):
        with pytest.raises(ValueError, match="nested too deeply, the limit is 100 levels"):
            files.parse_json(text)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_end_at_newlines_alone(tmp_path, name):
    text = "\ufeffa\u2028b\r\n\né"
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = list(files.read_lines(tmp_path / name, remedy=""))
    assert found == [(1, "a\u2028b\r"), (2, ""), (3, "é")]


@pytest.mark.parametrize("name", ["model-1.safetensors", "é", "..a"])
def test_plain_names_are_taken(name):
    assert files.require_plain_name(name, Path("index")) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", "a\n", "\ud800", "x" * 300, 3, None, ["a"]]
)
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(InputError, match=r"index names the file .* no plain name of a file beside"):
        files.require_plain_name(name, Path("index"))


def test_values_in_messages_are_short_and_one_line():
    for value in ("x" * 10**6, "a\nb", [[[[[[[["a"]]]]]]]] * 1000, {"a": "b" * 1000}, 10**1000):
        assert len(files.shown(value)) < 400
        assert "\n" not in files.shown(value)
    assert files.shown("llama") == "'llama'"
    assert files.brief(ValueError("a\n b" + "x" * 1000)) == "a b" + "x" * 297 + "..."
