from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from ssd_jax.errors import InputError
from tests.checkpoints import tiny_models as tiny

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("shards", [1, 3])
def test_bfloat16_tensors_are_read_as_stored(tmp_path, shards):
    tensors = tiny.write_hf(tmp_path, "qwen3", shards=shards)
    source = SafetensorsDirectory(tmp_path)
    assert source.shapes.keys() == tensors.keys()
    for name, array in tensors.items():
        assert source.shape(name) == array.shape
        read = source.read(name)
        assert read.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(read.astype(np.float32), array)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("index", [(slice(5, 9),), (slice(0, 64), slice(100, 130))])
def test_slices_of_tensors_are_read(tmp_path, shards, index):
    tensors = tiny.write_hf(tmp_path, shards=shards)
    part = SafetensorsDirectory(tmp_path).read(Q_PROJ, index)
    np.testing.assert_array_equal(part.astype(np.float32), tensors[Q_PROJ][index])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_float_types_are_read(tmp_path, dtype):
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    save_file({"a": array}, tmp_path / "model.safetensors")
    read = SafetensorsDirectory(tmp_path).read("a")
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, array)


def test_integers_are_refused_when_asked_for(tmp_path):
    save_file({"a": np.zeros((2, 3), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'a' has type I8.*supported: F32, F16, BF16"):
        SafetensorsDirectory(tmp_path).shape("a")


def test_a_missing_shard_is_named(tmp_path):
    tiny.write_hf(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003.safetensors is missing"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path, shards, keep):
    tiny.write_hf(tmp_path, shards=shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(InputError, match=rf"{path.name} .*not a whole safetensors file"):
        SafetensorsDirectory(tmp_path)


def test_an_index_that_names_an_absent_tensor_is_refused(tmp_path):
    tiny.write_hf(tmp_path, shards=3)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00001-of-00003.*'model.extra.weight'"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": ', '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"model.safetensors.index.json"):
        SafetensorsDirectory(tmp_path)


def test_other_formats_are_refused_with_what_is_there(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"neither model.safetensors nor .*pytorch_model.bin"):
        SafetensorsDirectory(tmp_path)


def test_a_whole_file_counts_before_an_index_of_older_shards(tmp_path):
    tiny.write_hf(tmp_path, "llama", tensors=tiny.hf_tensors("llama", seed=1), shards=2)
    newer = tiny.write_hf(tmp_path, "llama", tensors=tiny.hf_tensors("llama", seed=2))
    name = "model.norm.weight"
    for _ in range(2):
        found = SafetensorsDirectory(tmp_path).read(name).astype(np.float32)
        np.testing.assert_array_equal(found, newer[name])
        (tmp_path / "model-00001-of-00002.safetensors").unlink(missing_ok=True)
