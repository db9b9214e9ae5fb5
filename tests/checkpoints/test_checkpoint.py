from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ssd_jax.checkpoints import opening
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights import places
from ssd_jax.errors import InputError
from tests.checkpoints import tiny_gguf
from tests.checkpoints import tiny_models as tiny

EMBED = "model.embed_tokens.weight"


@pytest.fixture
def gguf_path(tmp_path):
    directory = tmp_path / "files"
    directory.mkdir()
    return tiny_gguf.write(directory / "m.gguf", "llama", tiny.hf_tensors("llama"))


@pytest.mark.parametrize("whole_directory", [False, True])
def test_a_gguf_file_opens_by_itself_or_by_its_directory(gguf_path, whole_directory):
    source = str(gguf_path.parent if whole_directory else gguf_path)
    checkpoint = open_checkpoint(source)
    assert checkpoint.source == source
    assert checkpoint.config.family == "llama"
    expected = tiny.hf_tensors("llama")[EMBED]
    np.testing.assert_array_equal(checkpoint.tensors.read(EMBED), expected)


def test_a_configuration_beside_a_gguf_file_needs_no_weights(gguf_path):
    (gguf_path.parent / "config.json").write_text('{"model_type": "llama"}')
    assert open_checkpoint(str(gguf_path.parent)).path == gguf_path


def test_several_gguf_files_are_ambiguous(gguf_path):
    (gguf_path.parent / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"2 GGUF files \(m.gguf, other.gguf\)"):
        open_checkpoint(str(gguf_path.parent))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_hugging_face_directory_opens(tmp_path, shards):
    tensors = tiny.write_hf(tmp_path, "qwen3", shards=shards)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.family == "qwen3"
    assert checkpoint.path == tmp_path
    np.testing.assert_array_equal(checkpoint.tensors.read(EMBED).astype(np.float32), tensors[EMBED])


def test_a_tied_checkpoint_needs_no_head(tmp_path):
    tensors = tiny.hf_tensors("llama", tied=True)
    tiny.write_hf(tmp_path, tensors=tensors, tie_word_embeddings=True)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config.tie_embeddings
    assert "lm_head.weight" not in checkpoint.tensors.shapes


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.bias"),
        ("llama", "model.layers.1.self_attn.k_norm.weight"),
        ("llama", "model.layers.1.mlp.gate_proj.lora_A.weight"),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.v_proj.weight_scale"),
        ("qwen3", "lm_head.bias"),
    ],
)
def test_a_tensor_that_the_decoder_would_leave_out_is_refused(tmp_path, family, name):
    tensors = tiny.hf_tensors(family) | {name: np.ones(32, np.float32)}
    tiny.write_hf(tmp_path, family, tensors=tensors)
    with pytest.raises(InputError, match=f"the decoder has no place for tensor '{name}'"):
        open_checkpoint(str(tmp_path))


def test_tensors_that_change_no_numbers_may_be_there(tmp_path):
    """As in Llama-2, in older exports, and where a tied head is stored, too."""
    surplus = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.masked_bias",
        "model.rotary_emb.inv_freq",
    )
    tensors = tiny.hf_tensors("llama", tied=True)
    tensors |= dict.fromkeys(surplus, np.ones(8, np.float32))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tiny.write_hf(tmp_path, tensors=tensors, tie_word_embeddings=True)
    assert set(surplus) <= open_checkpoint(str(tmp_path)).tensors.shapes.keys()


@pytest.mark.parametrize("rows", [1, 320], ids=["a row more", "another last number"])
def test_a_head_that_a_tied_model_would_leave_out_is_refused(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(places, "_ROWS_AT_A_TIME", 64)
    tensors = tiny.hf_tensors("llama", tied=True)
    embedding = tensors["model.embed_tokens.weight"]
    head = np.concatenate([embedding, embedding[:1]]) if rows == 1 else embedding.copy()
    head[-1, -1] += 1
    tensors["lm_head.weight"] = head
    tiny.write_hf(tmp_path, tensors=tensors, tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"lm_head.weight differs from .* set it to false in con"):
        open_checkpoint(str(tmp_path))


def test_the_tokenizer_comes_from_the_same_place(tmp_path, gguf_path, monkeypatch):
    given = []

    def read(source, **_):
        given.append(source)
        return SimpleNamespace(size=tiny.VOCAB)

    monkeypatch.setattr(opening, "tokenizer_from_gguf", read)
    monkeypatch.setattr(opening, "tokenizer_from_directory", read)
    open_checkpoint(str(gguf_path)).load_tokenizer()
    tiny.write_hf(tmp_path / "hf")
    open_checkpoint(str(tmp_path / "hf")).load_tokenizer()
    metadata, directory = given
    assert metadata["tokenizer.ggml.tokens"] == tiny_gguf.TOKENIZER["tokenizer.ggml.tokens"]
    assert directory == tmp_path / "hf"


def test_unknown_quantisations_of_hugging_face_checkpoints_are_refused(tmp_path):
    tiny.write_hf(tmp_path, quantization_config={"quant_method": "hqq", "nbits": 4})
    with pytest.raises(InputError, match=r"config.json: quantised with 'hqq'.*GGUF"):
        open_checkpoint(str(tmp_path))


def test_a_quantisation_of_null_is_none(tmp_path):
    tiny.write_hf(tmp_path, quantization_config=None)
    assert open_checkpoint(str(tmp_path)).config.family == "llama"


def test_an_unknown_architecture_is_refused_by_file(tmp_path):
    tiny.write_hf(tmp_path, model_type="mamba")
    with pytest.raises(InputError, match=r"config.json: model_type 'mamba'.*llama, qwen2, qwen3"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_config_is_named(tmp_path, text):
    tiny.write_hf(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"config.json"):
        open_checkpoint(str(tmp_path))


def test_a_directory_without_a_model_tells_what_it_expected_and_found(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(InputError, match=r"expected ssd_jax.json, config.json.*found notes.txt"):
        open_checkpoint(str(tmp_path))


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(json.dumps({}).encode())
    with pytest.raises(InputError, match=r"not a GGUF file"):
        open_checkpoint(str(path))
