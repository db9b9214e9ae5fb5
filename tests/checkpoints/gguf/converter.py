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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from tests.checkpoints.tiny_gguf import interleave

ARCHITECTURES = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
ARCHITECTURES.setdefault("hy_v3", ARCHITECTURES["exaone-moe"])
"""By name; of one that older releases of the package lack, another with tensors of its names."""
_WITHOUT_EXPERTS = {"qwen3moe": "qwen3"}
"""Architectures whose layers all have experts, and what names tensors of one that has none."""
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_OF_HEAD = re.compile(r"(.+\.[qk]_layernorm)\.norms\.(\d+)(\.weight)")
_NEIGHBOURS = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "arcee")
_PARTIAL = {
    "phi3": 1.0,
    "chatglm": 0.5,
    "glm4": 0.5,
    "glm4moe": 0.5,
    "minimax-m2": 0.5,
    "nemotron": 0.5,
    "stablelm": 0.25,
}
"""Architectures that rotate a part of a head, and which one without `partial_rotary_factor`."""


def convert(directory: Path, path: Path, architecture: str, matrices: str = "F32") -> Path:
    """Writes the checkpoint of a directory under an architecture of llama.cpp.

    Args:
      matrices: type of those that are not MXFP4; vectors are in float32.
    """
    config = json.loads((directory / "config.json").read_text())
    config |= config.get("text_config", {})
    if config["model_type"] == "granitemoehybrid":
        del config["layer_types"]  # all alike
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(config["vocab_size"])])
    _write_keys(writer, config, architecture)
    names, plain = (
        gguf.get_tensor_name_map(ARCHITECTURES[name], _layers(config))
        for name in (architecture, _WITHOUT_EXPERTS.get(architecture, architecture))
    )
    suffixes = ".weight", ".bias"
    stored = SafetensorsDirectory(directory)
    for name, array in _tensors(stored, config):
        if name == "lm_head.weight" and architecture.startswith("gemma"):
            continue
        kind = "MXFP4" if array.dtype == np.uint8 else matrices if array.ndim > 1 else "F32"
        number = gguf.GGMLQuantizationType[kind]
        if kind != "MXFP4":
            array = gguf.quants.quantize(_converted(name, array, config, architecture), number)
        stored_name = names.get_name(name, suffixes) or plain.get_name(name, suffixes)
        writer.add_tensor(stored_name, array, raw_dtype=number)
    _write_activations(writer, stored)
    for name, numbers in _factors(config).items():
        writer.add_tensor(f"{name}.weight", np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layers(config: dict[str, Any]) -> int:
    """Those that predict tokens further on are layers, too."""
    return config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)


def _tensors(
    stored: SafetensorsDirectory, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors by names that the gguf package knows, in float32, or bytes of MXFP4; a matrix of all
    experts is one, by a name without their numbers."""
    of_experts: dict[str, dict[int, np.ndarray]] = {}
    interleaved = config["model_type"] == "gpt_oss"
    for stored_name in stored.shapes:
        name = stored_name.replace("language_model.", "")
        if ".visual." in name or ".act_fn." in name:
            continue
        if name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
            blocks = _mxfp4(stored.read_stored(name), stored.read_stored(f"{module}_scales"))
            yield from _apart(f"{module}.weight", blocks, interleaved=True)
            continue
        if name.endswith("_scales"):
            continue
        array, match = stored.read(stored_name).astype(np.float32), _OF_EXPERT.fullmatch(name)
        of_head = _OF_HEAD.fullmatch(name)
        if of_head is not None:
            of_experts.setdefault(f"{of_head[1]}{of_head[3]}", {})[int(of_head[2])] = array
        elif match is not None:
            of_experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
        elif name.endswith((".gate_up_proj", ".experts.down_proj")):  # turned
            turned = np.ascontiguousarray(array.swapaxes(1, 2))
            yield from _apart(f"{name}.weight", turned, interleaved=interleaved)
        elif name.endswith("_proj_bias"):
            yield from _apart(name.replace("_bias", ".bias"), array, interleaved=True)
        elif ".shared_mlp.input_linear." in name:
            renamed = name.replace("shared_mlp.input_linear", "mlp.gate_up_proj")
            half = array.shape[0] // 2
            for part, rows in zip(("gate", "up"), (array[:half], array[half:]), strict=True):
                yield renamed.replace("gate_up", part), rows
        elif ".shared_mlp.output_linear." in name:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), array
        elif ".input_linear." in name:
            renamed = name.replace("block_sparse_moe.input_linear", "mlp.experts.gate_up_proj")
            yield from _apart(renamed, array, interleaved=False)
        elif name.endswith("shared_expert_gate.weight"):
            yield name, array[0]
        elif name.endswith("self_attn.sinks"):
            yield f"{name}.weight", array
        else:
            renamed = name.replace("correction_bias", "correction.bias")
            yield renamed.replace("mlp.gate.moe_statics", "mlp.moe_statics"), array
    for name, experts in of_experts.items():
        name = name.replace("model.layers", "layers") if ".block_sparse_moe." in name else name
        name = name.replace(".block_sparse_moe.", ".feed_forward.")
        yield name, np.stack([experts[number] for number in range(len(experts))])


def _apart(name: str, array: np.ndarray, *, interleaved: bool) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of two joined matrices of every expert, or of one that is alone."""
    if ".gate_up_proj." not in name:
        yield name, array
        return
    half = array.shape[1] // 2
    parts = (array[:, ::2], array[:, 1::2]) if interleaved else (array[:, :half], array[:, half:])
    for part, rows in zip(("gate", "up"), parts, strict=True):
        yield name.replace(".gate_up_proj.", f".{part}_proj."), np.ascontiguousarray(rows)


def _mxfp4(pairs: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """ggml's blocks: an exponent, then bytes with inputs j and j + 16; a byte of `pairs` has 2j and
    2j + 1."""
    inputs = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], 32)
    halves = inputs[..., :16] | inputs[..., 16:] << 4
    blocks = np.concatenate([exponents[..., None], halves], axis=-1)
    return blocks.reshape(*blocks.shape[:2], -1)


def _write_keys(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta")} | ropes.get("full_attention", ropes)
    writer.add_block_count(_layers(config))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    key = "shared_intermediate_size" if architecture == "granite" else "intermediate_size"
    writer.add_feed_forward_length(config.get(key, config["intermediate_size"]))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if rope.get("alpha"):
        rope["rope_theta"] *= rope["alpha"] ** (config["head_dim"] / (config["head_dim"] - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    if architecture not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    local = ropes.get("sliding_attention", {}).get("rope_theta", config.get("rope_local_base_freq"))
    if local is not None:
        writer.add_rope_freq_base_swa(local)
    if architecture in _NEIGHBOURS:
        writer.add_rope_dimension_count(config["head_dim"])
    if architecture in _PARTIAL:
        part = config.get("partial_rotary_factor", _PARTIAL[architecture])
        writer.add_rope_dimension_count(int(part * config["head_dim"]))
    if architecture in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss") or "layer_types" in config:
        writer.add_sliding_window(config["sliding_window"] or 0)
    if "layer_types" in config and architecture != "gpt-oss":
        writer.add_sliding_window_pattern([t != "full_attention" for t in config["layer_types"]])
    _write_keys_of_experts(writer, config, architecture)
    if architecture in ("command-r", "cohere2"):
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "cohere2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_dimension_count(config["head_dim"])
    if architecture == "stablelm":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_parallel_residual(config.get("use_parallel_residual", True))
    if architecture == "jais2":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config["norm_epsilon"])
    if architecture == "nemotron":
        writer.add_layer_norm_eps(config["norm_eps"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))


def _write_activations(writer: gguf.GGUFWriter, stored: SafetensorsDirectory) -> None:
    of = {
        "alpha_n": writer.add_xielu_alpha_n,
        "alpha_p": writer.add_xielu_alpha_p,
        "beta": writer.add_xielu_beta,
        "eps": writer.add_xielu_eps,
    }
    for name, write in of.items():
        every = sorted(tensor for tensor in stored.shapes if tensor.endswith(f".act_fn.{name}"))
        if every:
            write([float(stored.read(tensor).astype(np.float32).item()) for tensor in every])


def _write_keys_of_experts(
    writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str
) -> None:
    of = {
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "n_routed_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "n_shared_experts": writer.add_expert_shared_count,
        "num_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
        "router_scaling_factor": writer.add_expert_weights_scale,
        "num_nextn_predict_layers": writer.add_nextn_predict_layers,
        "moe_num_experts": writer.add_expert_count,
        "moe_k": writer.add_expert_used_count,
        "moe_layer_interval": writer.add_interleave_moe_layer_step,
        "moe_layer_start_index": writer.add_leading_dense_block_count,
        "moe_num_shared_experts": writer.add_expert_shared_count,
    }
    if architecture == "hy_v3":  # files do not say how many experts see all tokens, nor from where
        del of["num_shared_experts"], of["first_k_dense_replace"]
    for key, write in of.items():
        if key in config:
            write(config[key])
    if architecture == "ernie4_5-moe":
        per_head = config["intermediate_size"] // config["num_key_value_heads"]
        writer.add_expert_shared_feed_forward_length(per_head)
    if architecture in ("exaone-moe", "hy_v3"):
        size = config["moe_intermediate_size"] * config["num_shared_experts"]
        writer.add_expert_shared_feed_forward_length(size)
    if architecture == "hunyuan-moe":
        writer.add_expert_used_count(config["moe_topk"][0])
        writer.add_expert_shared_count(1)
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
    if architecture in ("gpt-oss", "minimax-m2", "hunyuan-moe"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if architecture in ("glm4moe", "dots1", "exaone-moe", "hy_v3"):
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
    if architecture in ("glm4moe", "dots1", "minimax-m2", "exaone-moe", "hy_v3"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


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
