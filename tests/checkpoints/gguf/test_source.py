from __future__ import annotations

import json
import struct

import gguf
import numpy as np
import pytest

from ssd_jax.checkpoints.gguf.header import read_header
from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture
def llama_path(tmp_path):
    return tiny_gguf.write(tmp_path / "model.gguf", "llama", tiny.hf_tensors("llama"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_gives_the_tensors_and_configuration_it_was_written_from(tmp_path, family, tied):
    tensors = tiny.hf_tensors(family, tied=tied)
    file = GGUFFile(tiny_gguf.write(tmp_path / "model.gguf", family, tensors))
    assert file.shapes.keys() == tensors.keys()
    for name, array in tensors.items():
        assert file.shape(name) == array.shape
        np.testing.assert_array_equal(file.read(name), array, err_msg=name)
    assert file.config == ModelConfig.from_hf(tiny.hf_config(family, tie_word_embeddings=tied))


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "self_attn.k_proj.weight"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_reordered_rows_can_be_sliced(tmp_path, name, kind):
    name = f"model.layers.1.{name}"
    types = {name: kind}
    path = tiny_gguf.write(tmp_path / "model.gguf", "llama", tiny.hf_tensors("llama"), types=types)
    file = GGUFFile(path)
    all_rows = file.read(name)
    for index in [(slice(10, 90),), (slice(64, 128), slice(40, 72)), (slice(None), slice(0, 32))]:
        np.testing.assert_array_equal(file.read(name, index), all_rows[index])


def test_embedding_and_head_of_different_types_are_kept_apart(tmp_path):
    tensors = tiny.hf_tensors("qwen2")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied before quantisation
    types = {"model.embed_tokens.weight": "Q5_0", "lm_head.weight": "Q8_0"}
    file = GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", "qwen2", tensors, types=types))
    assert not file.config.tie_embeddings
    for name, kind in types.items():
        number = gguf.GGMLQuantizationType[kind]
        stored = gguf.quants.quantize(tensors[name], number)
        np.testing.assert_array_equal(file.read(name), gguf.quants.dequantize(stored, number))


def test_the_header_holds_what_the_gguf_package_reads(llama_path):
    header = read_header(llama_path)
    reader = gguf.GGUFReader(llama_path)
    fields = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    assert header.metadata == fields
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert list(info.shape) == tensor.shape.tolist()[::-1]
        assert (info.type_id, info.offset) == (tensor.tensor_type, tensor.data_offset)
    json.dumps(header.metadata)  # plain Python values


def test_a_stated_alignment_is_honoured(tmp_path):
    path, embedding = tmp_path / "m.gguf", np.ones((tiny.VOCAB, tiny.HIDDEN), np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(4096)
    for key, value in tiny_gguf.metadata("llama").items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    writer.add_tensor("token_embd.weight", embedding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.testing.assert_array_equal(GGUFFile(path).read("model.embed_tokens.weight"), embedding)


def test_an_explicit_head_size_is_honoured(tmp_path):
    tensors = tiny.hf_tensors("qwen3")
    keys = tiny_gguf.metadata(
        "qwen3", embedding_length=512, attention__key_length=64, attention__value_length=64
    )
    config = GGUFFile(tiny_gguf.write(tmp_path / "m.gguf", "qwen3", tensors, keys=keys)).config
    assert config.head_dim == 64
    assert config.hidden_size // config.num_heads == 128


def test_missing_kv_head_count_means_as_many_as_query_heads(tmp_path):
    keys = tiny_gguf.metadata("qwen2", attention__head_count_kv=None)
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", tiny.hf_tensors("qwen2"), keys=keys)
    assert GGUFFile(path).config.num_kv_heads == tiny.HEADS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": 8}, r"metadata key llama.expert_used_count is missing"),
        ({"attention__sliding_window": 64}, r"sliding_window = 64"),
        ({"attention__causal": False}, r"causal = False is not supported; expected True"),
        ({"rope__scaling__attn_factor": 1.5}, r"attn_factor = 1.5 is not supported; expected 1.0"),
        ({"rope__dimension_count": 32}, r"rope.dimension_count = 32 .* expected 64"),
        ({"attention__value_length": 32}, r"value_length = 32"),
        ({"attention__head_count_kv": [2, 4]}, r"head_count_kv differs from layer to layer"),
        ({"block_count": None}, r"key llama.block_count is missing"),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            r"original_context_length is missing",
        ),
        ({"rope__scaling__type": "ntk", "rope__scaling__factor": 4.0}, r"'ntk' is not supported"),
    ],
)
def test_unsupported_metadata_is_refused_by_key(tmp_path, changes, message):
    keys = tiny_gguf.metadata("llama", **changes)
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny.hf_tensors("llama"), keys=keys)
    with pytest.raises(InputError, match=message):
        GGUFFile(path)


def test_unknown_architecture_names_the_supported_ones(tmp_path):
    path = tiny_gguf.write(tmp_path / "m.gguf", "mamba", {})
    with pytest.raises(InputError, match=r"m.gguf.*'mamba'.*llama, .*qwen2, qwen3"):
        GGUFFile(path)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    raw = {"blk.0.ffn_gate_exps.weight": (np.zeros((4, 32), np.float32), "F32")}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny.hf_tensors("llama"), raw=raw)
    with pytest.raises(InputError, match=r"no place for tensor 'blk.0.ffn_gate_exps.weight'"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "blk.1.ffn_down.bias"),
        ("llama", "blk.1.attn_k.bias"),
        ("llama", "blk.1.attn_q_norm.weight"),
        ("qwen2", "blk.1.attn_output.bias"),
        ("qwen3", "output.bias"),
    ],
)
def test_a_tensor_that_the_family_does_not_use_is_refused(tmp_path, family, name):
    """llama.cpp adds such biases: leaving them out would be another model."""
    raw = {name: (np.ones(32, np.float32), "F32")}
    path = tiny_gguf.write(tmp_path / "m.gguf", family, tiny.hf_tensors(family), raw=raw)
    with pytest.raises(InputError, match=f"no place for tensor '{name}'"):
        GGUFFile(path)


def test_one_of_several_parts_is_refused(tmp_path):
    keys = tiny_gguf.metadata("llama") | {"split.count": 3}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tiny.hf_tensors("llama"), keys=keys)
    with pytest.raises(InputError, match=r"one of 3 parts"):
        GGUFFile(path)


def test_another_kind_of_file_is_refused_by_its_first_bytes(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    with pytest.raises(InputError, match=r"model.gguf.*expected.*b'GGUF'.*found b'PK"):
        GGUFFile(path)


def test_missing_data_is_reported_with_both_sizes(llama_path):
    data = llama_path.read_bytes()
    llama_path.write_bytes(data[:-5000])
    with pytest.raises(InputError, match=rf"truncated.* {len(data)} .* {len(data) - 5000}") as e:
        GGUFFile(llama_path)
    assert str(llama_path) in str(e.value)


def test_a_header_cut_anywhere_is_refused(llama_path):
    data = llama_path.read_bytes()
    end = min(info.offset for info in read_header(llama_path).tensors.values())
    for size in [4, 7, 8, 20, 24, *range(25, end - 64, 97)]:
        llama_path.write_bytes(data[:size])
        with pytest.raises(InputError, match=rf"truncated in its header.*found {size}"):
            GGUFFile(llama_path)


def test_one_damaged_byte_of_the_header_never_surfaces_as_another_error(tmp_path):
    name = "model.embed_tokens.weight"
    tensors = {name: tiny.hf_tensors("llama")[name]}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", tensors)
    GGUFFile(path)
    data, refused = path.read_bytes(), 0
    for at in range(4, 900):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            GGUFFile(path)
        except InputError:
            refused += 1
    assert refused > 300


@pytest.mark.parametrize(("version", "hint"), [(1, ""), (4, ""), (3 << 24, "big-endian")])
def test_other_versions_are_refused(llama_path, version, hint):
    data = llama_path.read_bytes()
    llama_path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:])
    with pytest.raises(InputError, match=rf"version {version}.*{hint}.*supported: 2, 3"):
        GGUFFile(llama_path)
