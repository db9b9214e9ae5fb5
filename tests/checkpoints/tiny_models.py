"""Tiny random models: their configuration and tensors as Hugging Face has them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

VOCAB, HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 40, 256, 512, 2, 4, 2, 64


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    } | changes


def hf_tensors(family: str, *, tied: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors whose values bfloat16 represents exactly; the arrays are read-only."""
    return dict(_hf_tensors(family, tied, seed))


@functools.cache
def _hf_tensors(family: str, tied: bool, seed: int) -> Mapping[str, np.ndarray]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        block = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (q, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, q),
            "mlp.gate_proj.weight": (FFN, HIDDEN),
            "mlp.up_proj.weight": (FFN, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, FFN),
        }
        if family == "qwen2":
            block |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if family == "qwen3":
            block |= {f"self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.normal(size=shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in shapes.items()
    }
    for array in tensors.values():
        array.flags.writeable = False
    return tensors


def write_hf(
    directory: Path,
    family: str = "llama",
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    shards: int = 1,
    **changes: Any,
) -> dict[str, np.ndarray]:
    """Writes a Hugging Face directory with bfloat16 weights; returns the tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(hf_tensors(family) if tensors is None else tensors)
    (directory / "config.json").write_text(json.dumps(hf_config(family, **changes)))
    stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    if shards == 1:
        save_file(stored, directory / "model.safetensors")
        return tensors
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: stored[name] for name in sorted(stored)[number::shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


class TokenizerFile:
    """Stands for a tokenizer: saves one file."""

    def within(self, rows: int) -> TokenizerFile:
        del rows
        return self

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")
