"""Writes Hugging Face directories as GGUF files, as `convert_hf_to_gguf.py` of llama.cpp does.

Names of keys and tensors are those of the `gguf` package, which the converter takes them from, too.
Two things are done otherwise, because the tiny models have heads of other sizes than
hidden_size / num_attention_heads: the size of a head is written for Granite, too, and the rotated
part of a head is a part of that size. What llama.cpp's graph of an architecture cannot express, a
scale of scores that is not that of the architecture, is folded into the queries: a power of two.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ssd_jax.checkpoints.safetensors import SafetensorsDirectory
from tests.checkpoints.tiny_gguf import interleave

ARCHITECTURES = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
_WITHOUT_EXPERTS = {"qwen3moe": "qwen3"}
"""Architectures whose layers all have experts, and what names tensors of one that has none."""
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_NEIGHBOURS = ("llama", "mistral3", "smollm3", "granite")
_PARTIAL = {"phi3": 1.0, "glm4": 0.5, "nemotron": 0.5}
"""Architectures that rotate a part of a head, and which one without `partial_rotary_factor`."""


def convert(directory: Path, path: Path, architecture: str) -> Path:
    """Writes the checkpoint of a directory, in float32, under an architecture of llama.cpp."""
    config = json.loads((directory / "config.json").read_text())
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(config["vocab_size"])])
    _write_keys(writer, config, architecture)
    names, plain = (
        gguf.get_tensor_name_map(ARCHITECTURES[name], config["num_hidden_layers"])
        for name in (architecture, _WITHOUT_EXPERTS.get(architecture, architecture))
    )
    for name, stored in _joined(SafetensorsDirectory(directory)).items():
        if name == "lm_head.weight" and architecture.startswith("gemma"):
            continue
        array = _converted(name, stored, config, architecture)
        suffixes = ".weight", ".bias"
        writer.add_tensor(names.get_name(name, suffixes) or plain.get_name(name, suffixes), array)
    for name, numbers in _factors(config).items():
        writer.add_tensor(f"{name}.weight", np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _joined(stored: SafetensorsDirectory) -> dict[str, np.ndarray]:
    """Tensors in float32; a matrix of all experts is one, by a name without their numbers."""
    tensors: dict[str, np.ndarray] = {}
    of_experts: dict[str, dict[int, np.ndarray]] = {}
    for name in stored.shapes:
        array, match = stored.read(name).astype(np.float32), _OF_EXPERT.fullmatch(name)
        if match is None:
            tensors[name] = array
        else:
            of_experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
    for name, experts in of_experts.items():
        name = name.replace("model.layers", "layers") if ".block_sparse_moe." in name else name
        name = name.replace(".block_sparse_moe.", ".feed_forward.")
        tensors[name] = np.stack([experts[number] for number in range(len(experts))])
    return tensors


def _write_keys(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta")} | ropes.get("full_attention", ropes)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    local = ropes.get("sliding_attention", {}).get("rope_theta", config.get("rope_local_base_freq"))
    if local is not None:
        writer.add_rope_freq_base_swa(local)
    if architecture in _NEIGHBOURS:
        writer.add_rope_dimension_count(config["head_dim"])
    if architecture in _PARTIAL:
        part = config.get("partial_rotary_factor", _PARTIAL[architecture])
        writer.add_rope_dimension_count(int(part * config["head_dim"]))
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("gemma2", "gemma3", "phi3") or "layer_types" in config:
        writer.add_sliding_window(config["sliding_window"] or 0)
    if "layer_types" in config:
        writer.add_sliding_window_pattern([t != "full_attention" for t in config["layer_types"]])
    count = config.get("num_local_experts", config.get("num_experts"))
    if count is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "nemotron":
        writer.add_layer_norm_eps(config["norm_eps"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _converted(
    name: str, array: np.ndarray, config: dict[str, Any], architecture: str
) -> np.ndarray:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    if name.endswith("norm.weight") and architecture in ("gemma", "gemma2", "gemma3", "nemotron"):
        array = array + 1
    for part, count in heads.items():
        if f".{part}_proj." in name and architecture in _NEIGHBOURS:
            array = interleave(array, count)
    folded = {"gemma2": ".q_proj.weight", "gemma3": ".q_norm.weight"}.get(architecture)
    if folded is not None and name.endswith(folded):
        array = array * np.float32(math.sqrt(config["head_dim"] / config["query_pre_attn_scalar"]))
    return array


def _factors(config: dict[str, Any]) -> dict[str, list[float]]:
    scaling = config.get("rope_scaling") or {}
    return {
        f"rope_factors_{length}": scaling[f"{length}_factor"]
        for length in ("long", "short")
        if f"{length}_factor" in scaling
    }
