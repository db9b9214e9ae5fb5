"""Tiny GGUF files, written with the `gguf` package and the converter's conventions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoints import tiny_models as tiny

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": [f"token {i} é" for i in range(tiny.VOCAB)],
    "tokenizer.ggml.token_type": [1] * tiny.VOCAB,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.eos_token_id": 3,
}


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for q and k of `llama`: the partners i and i + d/2 of a rotation become
    the neighbours 2i and 2i + 1.
    """
    size = len(array) // heads
    stored = np.empty_like(array)
    for head in range(heads):
        for i in range(size // 2):
            stored[head * size + 2 * i] = array[head * size + i]
            stored[head * size + 2 * i + 1] = array[head * size + i + size // 2]
    return stored


def gguf_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[base]}.{kind}"


def metadata(architecture: str, **changes: Any) -> dict[str, Any]:
    """Keys under the architecture's prefix; a change to None leaves a key out."""
    keys = {
        "block_count": tiny.LAYERS,
        "context_length": 128,
        "embedding_length": tiny.HIDDEN,
        "feed_forward_length": tiny.FFN,
        "attention.head_count": tiny.HEADS,
        "attention.head_count_kv": tiny.KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}


def write(
    path: Path,
    architecture: str,
    tensors: Mapping[str, np.ndarray],
    *,
    types: Mapping[str, str] | None = None,
    keys: Mapping[str, Any] | None = None,
    raw: Mapping[str, tuple[np.ndarray, str]] | None = None,
) -> Path:
    """Writes tensors given by Hugging Face's names.

    Args:
      types: storage type by name; F32 where not named.
      keys: metadata beside, or in place of, the tokenizer's; by default `metadata(architecture)`.
      raw: further tensors by GGUF name: stored bytes (or floats) and type.
    """
    writer = gguf.GGUFWriter(path, architecture)
    keys = metadata(architecture) if keys is None else keys
    for key, value in {**TOKENIZER, **keys}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            kinds.get(type(value), writer.add_string)(key, value)
    for name, array in tensors.items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = interleave(array, tiny.HEADS if ".q_proj." in name else tiny.KV_HEADS)
        kind = gguf.GGMLQuantizationType[(types or {}).get(name, "F32")]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, (array, kind) in (raw or {}).items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
