from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax.checkpoints import orbax
from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.errors import InputError, SsdError
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny
from tests.system.full_disk import files_of_at_most

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def source(tmp_path) -> Checkpoint:
    """A Hugging Face directory with a stand-in for its tokenizer."""
    tiny.write_hf(tmp_path / "hf")
    checkpoint = open_checkpoint(str(tmp_path / "hf"))
    return dataclasses.replace(checkpoint, load_tokenizer=tiny.TokenizerFile)


@pytest.fixture
def written(tmp_path, source) -> Path:
    orbax.write_checkpoint(tmp_path / "out", source, "bfloat16")
    return tmp_path / "out"


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint8)


@pytest.mark.parametrize("surplus", [np.arange(4), np.zeros((0, 4), np.float32)], ids=str)
def test_tensors_that_the_model_does_not_use_are_left_out(tmp_path, source, surplus):
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | {"model.position_ids": surplus}, file)
    opened = open_checkpoint(str(tmp_path / "hf"))
    opened = dataclasses.replace(opened, load_tokenizer=source.load_tokenizer)
    orbax.write_checkpoint(tmp_path / "out", opened, "bfloat16")
    written = open_checkpoint(str(tmp_path / "out"))
    assert written.tensors.shapes.keys() == source.tensors.shapes.keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_checkpoint_is_read_back_bit_for_bit(tmp_path, source, dtype):
    orbax.write_checkpoint(tmp_path / "out", source, dtype)
    back = open_checkpoint(str(tmp_path / "out"))
    assert back.config == source.config
    assert back.tensors.shapes.keys() == source.tensors.shapes.keys()
    for name in source.tensors.shapes:
        array = back.tensors.read(name)
        expected = source.tensors.read(name)
        stored = np.dtype(dtype if expected.ndim > 1 else "float32")
        assert array.dtype == stored
        assert back.tensors.shape(name) == expected.shape
        np.testing.assert_array_equal(bits(array), bits(expected.astype(stored)), err_msg=name)


def test_numbers_that_are_hard_on_a_format_survive(tmp_path, source, monkeypatch):
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)  # nan, inf, -0 ...

    class Patterns:
        def shape(self, name):
            return (256, 256)

        def read(self, name, index=None):
            return patterns.reshape(256, 256) if name == "a" else np.zeros((256, 256), np.float32)

    monkeypatch.setattr(orbax, "tensor_structs", lambda _config: ("a", "zero"))
    checkpoint = dataclasses.replace(source, tensors=Patterns())
    orbax.write_checkpoint(tmp_path / "out", checkpoint, "bfloat16")
    back = orbax.OrbaxDirectory(tmp_path / "out")
    np.testing.assert_array_equal(back.read("a").reshape(-1).view(np.uint16), np.arange(1 << 16))
    assert not back.read("zero").any()


@pytest.mark.parametrize("index", [(slice(5, 9),), (slice(0, 64), slice(100, 130))])
def test_slices_of_stored_arrays_are_read(written, source, index):
    part = open_checkpoint(str(written)).tensors.read(Q_PROJ, index)
    np.testing.assert_array_equal(part, source.tensors.read(Q_PROJ)[index])


def test_large_arrays_are_stored_in_pieces(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 1 << 12)
    tiny.write_hf(tmp_path / "hf")
    checkpoint = open_checkpoint(str(tmp_path / "hf"))
    checkpoint = dataclasses.replace(checkpoint, load_tokenizer=tiny.TokenizerFile)
    orbax.write_checkpoint(tmp_path / "out", checkpoint, "bfloat16")
    with ocp.PyTreeCheckpointer() as checkpointer:
        stored = checkpointer.metadata(tmp_path / "out" / "arrays").item_metadata.tree
    assert np.prod(stored[Q_PROJ].storage.chunk_shape) * 2 <= 1 << 12


def test_orbax_itself_restores_the_arrays(written, source):
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(written / "arrays")
    assert restored.keys() == source.tensors.shapes.keys()
    np.testing.assert_array_equal(np.asarray(restored[Q_PROJ]), source.tensors.read(Q_PROJ))


def test_the_manifest_tells_where_the_weights_came_from(tmp_path, written):
    manifest = json.loads((written / "ssd_jax.json").read_text())
    assert manifest["format"] == 1
    assert manifest["source"] == str(tmp_path / "hf")
    assert manifest["dtype"] == "bfloat16"
    assert manifest["source_sha256"].keys() == {"model.safetensors"}
    assert (written / "tokenizer.json").exists()


def test_converting_again_keeps_the_origin(tmp_path, written):
    first = json.loads((written / "ssd_jax.json").read_text())
    checkpoint = open_checkpoint(str(written))
    checkpoint = dataclasses.replace(checkpoint, load_tokenizer=tiny.TokenizerFile)
    orbax.write_checkpoint(tmp_path / "again", checkpoint, "float32")
    second = json.loads((tmp_path / "again" / "ssd_jax.json").read_text())
    assert second["source_sha256"] == first["source_sha256"]


def test_a_gguf_file_is_written_with_its_hash(tmp_path):
    from hashlib import sha256

    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny.hf_tensors("llama"))
    checkpoint = open_checkpoint(str(path))
    checkpoint = dataclasses.replace(checkpoint, load_tokenizer=tiny.TokenizerFile)
    orbax.write_checkpoint(tmp_path / "out", checkpoint, "float32")
    manifest = json.loads((tmp_path / "out" / "ssd_jax.json").read_text())
    assert manifest["source_sha256"] == {"m.gguf": sha256(path.read_bytes()).hexdigest()}
    back = open_checkpoint(str(tmp_path / "out"))
    assert back.config == checkpoint.config
    np.testing.assert_array_equal(back.tensors.read(Q_PROJ), checkpoint.tensors.read(Q_PROJ))


def test_an_existing_destination_is_refused_and_left_alone(tmp_path, source):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match=r"out exists and is not empty"):
        orbax.write_checkpoint(out, source, "bfloat16")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    with pytest.raises(InputError, match=r"exists"):
        orbax.write_checkpoint(out / "mine.txt", source, "bfloat16")


def test_an_empty_destination_is_taken(tmp_path, source):
    (tmp_path / "out").mkdir()
    orbax.write_checkpoint(tmp_path / "out", source, "bfloat16")
    assert open_checkpoint(str(tmp_path / "out")).config == source.config


def test_other_dtypes_are_refused(tmp_path, source):
    with pytest.raises(InputError, match=r"'int8'; supported: float32, bfloat16"):
        orbax.write_checkpoint(tmp_path / "out", source, "int8")


def test_progress_reaches_the_total(tmp_path, source):
    calls = []
    orbax.write_checkpoint(
        tmp_path / "out", source, "bfloat16", progress=lambda *call: calls.append(call)
    )
    done = [so_far for so_far, _ in calls]
    assert done == sorted(set(done))
    assert calls[-1][0] == calls[-1][1] > 0


def test_too_little_room_is_said_before_anything_is_read(tmp_path, source, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    monkeypatch.setattr(orbax, "_read_all", pytest.fail)
    with pytest.raises(InputError, match=r"out has room for 1,000 bytes.* take [\d,]+; make"):
        orbax.write_checkpoint(tmp_path / "out", source, "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fills_up_is_said_in_one_error(tmp_path, tiny_checkpoint, caplog):
    source = open_checkpoint(str(tiny_checkpoint))
    message = r"out cannot be written: .*File too large.*; make"
    with files_of_at_most(1000), pytest.raises(SsdError, match=message):
        orbax.write_checkpoint(tmp_path / "out", source, "bfloat16")
    assert list(tmp_path.iterdir()) == []
    assert not caplog.records


READING, WRITING = ["_read_all", "origin"], ["_save", "_write_json"]
STEPS = READING + WRITING


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", [OSError, ValueError])  # of tensorstore the latter
def test_a_failure_at_any_step_leaves_nothing(tmp_path, source, monkeypatch, step, kind):
    def fail(*_args):
        raise kind("no space left on device")

    monkeypatch.setattr(orbax, step, fail)
    blamed, why = (kind, "^no") if step in READING else (SsdError, "out cannot be written: no")
    with pytest.raises(blamed, match=why):
        orbax.write_checkpoint(tmp_path / "out", source, "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_leaves_nothing_that_opens(tmp_path, source, monkeypatch, step):
    """As a failure, but nobody cleans up afterwards."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_kwargs: None)
    test_body = getattr(orbax, step)

    def crash(*args):
        if step != "_write_json" or args[0].name == orbax.MANIFEST:
            raise KeyboardInterrupt
        return test_body(*args)

    monkeypatch.setattr(orbax, step, crash)
    with pytest.raises(KeyboardInterrupt):
        orbax.write_checkpoint(tmp_path / "out", source, "bfloat16")
    assert not (tmp_path / "out").exists()
    leftovers = [path for path in tmp_path.iterdir() if path.name != "hf"]
    assert len(leftovers) == 1
    with pytest.raises(InputError):
        open_checkpoint(str(leftovers[0]))


def test_another_format_version_is_refused(written):
    path = written / "ssd_jax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(InputError, match=r"ssd_jax.json: format 99 .* reads 1.*ssd-jax convert"):
        open_checkpoint(str(written))


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_files_are_found_on_opening(written, damage):
    files = [path for path in (written / "arrays").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    if damage == "remove":
        largest.unlink()
    else:
        largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"{largest.name} has \d+ bytes, expected \d+"):
        open_checkpoint(str(written))


def test_bytes_that_cannot_be_decoded_are_an_input_error(written):
    files = [path for path in (written / "arrays").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(bytes(largest.stat().st_size))
    checkpoint = open_checkpoint(str(written))

    def read_all():
        return [checkpoint.tensors.read(name) for name in checkpoint.tensors.shapes]

    with pytest.raises(InputError, match=r"cannot be read.*ssd-jax convert"):
        read_all()
