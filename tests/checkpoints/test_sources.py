from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from ssd_jax.checkpoints.sources import resolve
from ssd_jax.errors import InputError
from ssd_jax.system.cache_dir import cache_dir


def test_a_path_is_resolved_to_itself(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert resolve(str(path)) == path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert resolve("~/model.gguf") == tmp_path / "model.gguf"


def test_a_path_may_carry_its_hash(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and more")
    good = sha256(path.read_bytes()).hexdigest()
    assert resolve(f"{path}#sha256={good}") == path
    assert resolve(f"{path}#sha256={good.upper()}") == path
    path.write_bytes(b"GGUF and morf")
    found = sha256(path.read_bytes()).hexdigest()
    with pytest.raises(InputError, match=rf"has sha256 {found}, expected {good}"):
        resolve(f"{path}#sha256={good}")


@pytest.mark.parametrize("given", ["", "zz", "0" * 63])
def test_a_malformed_hash_is_refused_before_the_file_is_read(tmp_path, given):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="needs the 64 hexadecimal digits"):
        resolve(f"{tmp_path / 'model.gguf'}#sha256={given}")


def test_a_hash_does_not_fit_a_directory(tmp_path):
    with pytest.raises(InputError, match="is a directory"):
        resolve(f"{tmp_path}#sha256={'0' * 64}")


def test_a_misspelt_path_names_what_is_near(tmp_path):
    (tmp_path / "smollm2.Q4_1.gguf").write_bytes(b"")
    with pytest.raises(InputError, match=r"does not exist \(near: .*smollm2.Q4_1.gguf\)"):
        resolve(str(tmp_path / "smolm2.Q4_1.gguf"))


def test_a_path_that_is_nothing_names_the_forms_of_a_source(tmp_path):
    with pytest.raises(InputError) as error:
        resolve(str(tmp_path / "nothing" / "at" / "all"))
    for form in ("path", "hf:org/name[@revision]", "pip:package==version"):
        assert form in str(error.value)


def test_a_bare_repository_name_is_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"did you mean hf:Qwen/Qwen3-0.6B\?"):
        resolve("Qwen/Qwen3-0.6B")


def test_the_cache_honours_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "ssd_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_dir() == Path.home() / ".cache" / "ssd_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ssd_jax"
