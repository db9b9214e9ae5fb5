"""Makes `tests/goldens/logits/`: tiny random checkpoints and the logits transformers gives them.

Run in the oracle environment (see the README beside this file) from the repository root:

    python tests/oracle/make_logits.py

Each folder holds what a Hugging Face repository holds, `config.json` and `model.safetensors`, and
`logits.npz` with `tokens` (int32 [2, 40]) and `logits` (float32 [2, 40, vocabulary]), computed in
float32 with eager attention from the saved files. The weights are drawn with NumPy from a fixed
seed and rounded to the type they are stored in, so a rerun reproduces them bit by bit.

`made_with.json` records the versions and, for every feature a loader could silently drop, how far
the logits move without it: a golden that does not notice a missing bias would test nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import platform
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

FOLDER = Path(__file__).resolve().parents[1] / "goldens" / "logits"
ROWS, POSITIONS = 2, 40
WEIGHT_SCALE, BIAS_SCALE = 0.2, 0.5
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
LEAST_EFFECT = 0.05  # logits; the tests compare within 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One checkpoint: its `config.json` as published models spell it, and its storage type.

    Attributes:
      prefixes: by the beginning of names of parameters, what takes its place in the file; empty for
        models of text alone.
      turned: whether the file has matrices of experts [experts, in, out].
    """

    config: Mapping[str, Any]
    dtype: torch.dtype
    ablations: Mapping[str, Callable[[transformers.PreTrainedModel], transformers.PreTrainedModel]]
    prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    turned: bool = False


def cases() -> dict[str, Case]:
    """The checkpoints by folder name; RoPE is spelled in both ways Hub checkpoints spell it."""
    common = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": WEIGHT_SCALE,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "use_cache": True,
        "vocab_size": 128,
    }
    llama = common | {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
    }
    return {
        # Base 500 puts wavelengths below, inside and above the band that llama3 interpolates in.
        "llama3-scaled": Case(
            config=llama
            | {
                "rope_scaling": LLAMA3,
                "rope_theta": 500.0,
                "tie_word_embeddings": True,
                "torch_dtype": "bfloat16",
            },
            dtype=torch.bfloat16,
            ablations={
                "rope scaling": _without_rope_scaling,
                "rope interpolation band": _without_rope_band,
                "rope theta": _with_default_theta,
            },
        ),
        "llama-linear": Case(
            config=llama
            | {
                "dtype": "bfloat16",
                "rope_parameters": {"factor": 4.0, "rope_theta": 10000.0, "rope_type": "linear"},
                "tie_word_embeddings": False,
            },
            dtype=torch.bfloat16,
            ablations={"rope scaling": _without_rope_scaling, "untied head": _with_tied_head},
        ),
        # As Llama 2 was first published: no rope_theta at all, and rope_scaling null.
        "llama-plain": Case(
            config=llama
            | {
                "hidden_size": 48,
                "intermediate_size": 48,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "rope_scaling": None,
                "tie_word_embeddings": True,
                "torch_dtype": "float32",
            },
            dtype=torch.float32,
            ablations={},
        ),
        "qwen2": Case(
            config=common
            | {
                "architectures": ["Qwen2ForCausalLM"],
                "max_window_layers": 2,
                "model_type": "qwen2",
                "rms_norm_eps": 1e-6,
                "rope_theta": 1000000.0,
                "sliding_window": 256,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                "use_sliding_window": False,
            },
            dtype=torch.bfloat16,
            ablations={
                "rope theta": _with_default_theta,
                "untied head": _with_tied_head,
                **{f"{part} bias": _zeroing(f"{part}_proj.bias") for part in "qkv"},
            },
        ),
        "qwen3": Case(
            config=common
            | {
                "architectures": ["Qwen3ForCausalLM"],
                "attention_bias": False,
                "dtype": "bfloat16",
                "head_dim": 16,
                "hidden_size": 48,
                "max_window_layers": 3,
                "model_type": "qwen3",
                "num_attention_heads": 6,
                "num_hidden_layers": 3,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
                "sliding_window": None,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
            },
            dtype=torch.bfloat16,
            ablations={
                "rope theta": _with_default_theta,
                **{f"{part} norm": _filling(f"{part}_norm.weight", 1.0) for part in "qk"},
            },
        ),
    }


def small_cases() -> dict[str, Case]:
    """Checkpoints of the other families: the mechanisms that they add are what is tested."""
    common = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": WEIGHT_SCALE,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    longrope = {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    }

    def case(model_type: str, ablations: Mapping[str, Callable[..., Any]], **changes: Any) -> Case:
        config = common | {"model_type": model_type} | changes
        return Case(config=config, dtype=torch.bfloat16, ablations=ablations)

    def without(**changes: Any) -> Callable[..., transformers.PreTrainedModel]:
        return functools.partial(_rebuilt, **changes)

    def phi3(original: int) -> Case:
        """Longrope whose texts are within or beyond what the model was trained on."""
        return case(
            "phi3",
            {"whole rotation": _with_default_rope, "attention factor": _without_attention_factor},
            num_attention_heads=2,
            num_key_value_heads=1,
            original_max_position_embeddings=original,
            partial_rotary_factor=0.75,
            rope_scaling=longrope,
            sliding_window=262144,
        )

    biases = {
        f"{part} bias": _zeroing(f"{part}_proj.bias")
        for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    output_norms = {"output norms": _filling("post_feedforward_layernorm.weight", 1.0)}
    qk_norms = {f"{part} norm": _filling(f"{part}_norm.weight", 1.0) for part in "qk"}
    gemma = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    gemma3 = {
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 100.0,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
        **gemma,
    }
    vision = {
        "head_dim": 16,
        "hidden_size": 16,
        "image_size": 28,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "patch_size": 14,
    }

    def seeing(
        model_type: str, text: Mapping[str, Any], prefixes: Mapping[str, str], **changes: Any
    ) -> Case:
        """A model that sees images, of which the text part is compared."""
        config = {
            "image_token_index": 63,
            "model_type": model_type,
            "text_config": common | text,
            "torch_dtype": "bfloat16",
            "vision_config": vision,
        }
        return Case(config=config | changes, dtype=torch.bfloat16, ablations={}, prefixes=prefixes)

    pixtral = {
        "spatial_merge_size": 1,
        "tie_word_embeddings": False,
        "vision_config": vision | {"model_type": "pixtral"},
    }
    siglip = {
        "boi_token_index": 61,
        "eoi_token_index": 62,
        "mm_tokens_per_image": 4,
        "vision_config": vision | {"model_type": "siglip_vision_model", "vision_use_head": False},
    }
    sections = {"mrope_section": [2, 3, 3]}
    qwen_vision = {
        "deepstack_visual_indexes": [0],
        "depth": 1,
        "fullatt_block_indexes": [0],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "num_position_embeddings": 4,
        "out_hidden_size": 32,
        "patch_size": 14,
    }
    qwen_vl = {
        "image_token_id": 63,
        "tie_word_embeddings": False,
        "video_token_id": 62,
        "vision_config": qwen_vision,
        "vision_end_token_id": 61,
        "vision_start_token_id": 60,
    }
    qwen3_vl = {
        "attention_bias": False,
        "rope_scaling": sections | {"mrope_interleaved": True, "rope_type": "default"},
    }
    growing = yarn | {
        "llama_4_scaling_beta": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 12,
        "rope_theta": 500.0,
    }
    mistral3 = {"model_type": "mistral", "sliding_window": None}
    gemma3_text = {"model_type": "gemma3_text", **gemma3}
    return {
        "llama-biases": case("llama", biases, attention_bias=True, mlp_bias=True),
        "qwen3-yarn": case(
            "qwen3",
            {"rope scaling": _without_rope_scaling, "attention factor": _without_attention_factor},
            rope_scaling=yarn,
            rope_theta=500.0,
            use_sliding_window=False,
        ),
        "mistral": case("mistral", {}, sliding_window=None),
        "smollm3": case(
            "smollm3",
            {"layer without RoPE": without(no_rope_layers=[1, 1, 1, 1])},
            num_hidden_layers=4,
            no_rope_layers=[1, 1, 1, 0],
            tie_word_embeddings=True,
        ),
        "granite": case(
            "granite",
            {
                name: without(**{name: plain})
                for name, plain in (
                    ("attention_multiplier", 16**-0.5),
                    ("embedding_multiplier", 1.0),
                    ("logits_scaling", 1.0),
                    ("residual_multiplier", 1.0),
                )
            },
            attention_multiplier=0.5,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.5,
        ),
        "phi3": phi3(64),
        "phi3-long": phi3(32),
        "olmo2": case("olmo2", output_norms | qk_norms),
        "glm": case("glm", {"bias": _zeroing("_proj.bias")}, **_GLM),
        "glm4": case("glm4", {"norms": _filling("post_mlp_layernorm.weight", 1.0)}, **_GLM),
        "seed-oss": case(
            "seed_oss",
            {"output bias": _zeroing("o_proj.bias")},
            attention_bias=True,
            attention_out_bias=True,
            mlp_bias=False,
        ),
        "nemotron": case(
            "nemotron",
            {"norm bias": _zeroing("norm.bias"), "norm weights": _zeroing("norm.weight")},
            hidden_act="relu2",
            norm_eps=1e-5,
            partial_rotary_factor=0.5,
        ),
        "gemma": case(
            "gemma",
            {"norm weights": _zeroing("norm.weight")},
            tie_word_embeddings=True,
            **gemma,
        ),
        # Windows of 12 tokens in texts of 40.
        "mistral-window": case(
            "mistral", {"window": without(sliding_window=None)}, sliding_window=12
        ),
        "olmo3": case(
            "olmo3",
            {"window": without(sliding_window=64)},
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": yarn | {"rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            sliding_window=12,
        ),
        "gemma2": case(
            "gemma2",
            {
                "window": without(sliding_window=64),
                "soft cap of scores": without(attn_logit_softcapping=None),
                "soft cap of logits": without(final_logit_softcapping=None),
                "scale of scores": without(query_pre_attn_scalar=16),
            },
            attn_logit_softcapping=5.0,
            final_logit_softcapping=10.0,
            query_pre_attn_scalar=64,
            sliding_window=12,
            tie_word_embeddings=True,
            **gemma,
        ),
        "gemma3": case(
            "gemma3_text",
            {"window": without(sliding_window=64)} | qk_norms,
            **gemma3,
        ),
        "ministral": case(
            "ministral",
            {"window": without(sliding_window=64)},
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=12,
        ),
        "ministral3": case(
            "ministral3",
            {"queries that grow": without(rope_parameters=growing | {"llama_4_scaling_beta": 0.0})},
            rope_parameters=growing,
            sliding_window=None,
        ),
        "mistral3": seeing("mistral3", mistral3, _OLDER, **pixtral),
        "mistral3-newer": seeing("mistral3", mistral3, _NEWER, **pixtral),
        "gemma3-vision": seeing("gemma3", gemma3_text, _OLDER, **siglip),
        "gemma3-vision-newer": seeing("gemma3", gemma3_text, _NEWER, **siglip),
        # With settings of the decoder beside those of images, as it was published.
        "qwen2-vl": Case(
            config=common
            | qwen_vl
            | {
                "head_dim": 8,
                "model_type": "qwen2_vl",
                "rope_scaling": {"mrope_section": [1, 1, 2], "type": "mrope"},
                "use_sliding_window": False,
                "vision_config": qwen_vision | {"embed_dim": 16, "hidden_size": 32},
            },
            dtype=torch.bfloat16,
            ablations={"bias": _zeroing("q_proj.bias")},
            prefixes=_NEWER,
        ),
        "qwen2.5-vl": seeing(
            "qwen2_5_vl",
            {
                "head_dim": 8,
                "model_type": "qwen2_5_vl_text",
                "rope_scaling": {"mrope_section": [1, 1, 2], "type": "mrope"},
            },
            _NEWER,
            **qwen_vl,
        ),
        "qwen3-vl": seeing(
            "qwen3_vl", qwen3_vl | {"model_type": "qwen3_vl_text"}, _NEWER, **qwen_vl
        ),
        "qwen3-vl-moe": dataclasses.replace(
            seeing(
                "qwen3_vl_moe",
                qwen3_vl
                | {
                    "decoder_sparse_step": 1,
                    "mlp_only_layers": [],
                    "model_type": "qwen3_vl_moe_text",
                    "moe_intermediate_size": 24,
                    "num_experts": 8,
                    "num_experts_per_tok": 3,
                },
                _NEWER,
                **qwen_vl,
            ),
            turned=True,
        ),
        "qwen3-moe": case(
            "qwen3_moe",
            {
                "normalised weights": without(norm_topk_prob=False),
                "experts of a token": without(num_experts_per_tok=2),
                "experts' order": _with_experts_in_another_order,
            },
            decoder_sparse_step=1,
            mlp_only_layers=[0],
            moe_intermediate_size=24,
            norm_topk_prob=True,
            num_experts=8,
            num_experts_per_tok=3,
            num_hidden_layers=3,
            use_sliding_window=False,
        ),
        "mixtral": case(
            "mixtral",
            {
                "experts of a token": without(num_experts_per_tok=1),
                "experts' order": _with_experts_in_another_order,
            },
            num_experts_per_tok=2,
            num_local_experts=4,
            sliding_window=None,
        ),
        "gpt-oss": case(
            "gpt_oss",
            {
                "sinks": _filling("sinks", -1e4),
                "router's bias": _zeroing("router.bias"),
                "biases of experts": _zeroing("_proj_bias"),
                "output bias": _zeroing("o_proj.bias"),
                "limit": without(swiglu_limit=100.0),
                "window": without(sliding_window=64),
                "experts of a token": without(num_experts_per_tok=1),
                "experts' order": _with_experts_in_another_order,
            },
            attention_bias=True,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
            num_experts_per_tok=2,
            num_local_experts=4,
            rope_scaling=yarn | {"truncate": False},
            rope_theta=500.0,
            sliding_window=12,
            swiglu_limit=1.0,
        ),
        "glm4-moe": case(
            "glm4_moe",
            {
                "correction": _zeroing("e_score_correction_bias"),
                "shared expert": _zeroing("shared_experts.down_proj.weight"),
                "scale": without(routed_scaling_factor=1.0),
                "normalised weights": without(norm_topk_prob=False),
                "layer without experts": _zeroing("layers.0.mlp.down_proj.weight"),
                "bias": _zeroing("q_proj.bias"),
            }
            | qk_norms,
            first_k_dense_replace=1,
            moe_intermediate_size=24,
            n_group=1,
            n_routed_experts=8,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=3,
            routed_scaling_factor=2.5,
            topk_group=1,
            use_qk_norm=True,
            **_GLM,
        ),
        "minimax-m2": case(
            "minimax_m2",
            {"correction": _zeroing("e_score_correction_bias")} | qk_norms,
            head_dim=16,
            num_experts_per_tok=3,
            num_local_experts=8,
            rotary_dim=8,
            scoring_func="sigmoid",
        ),
        "qwen2-moe": case(
            "qwen2_moe",
            {
                "shared expert": _zeroing("shared_expert.down_proj.weight"),
                "its gate": _zeroing("shared_expert_gate.weight"),
                "weights as they are": without(norm_topk_prob=True),
                "bias": _zeroing("k_proj.bias"),
            },
            moe_intermediate_size=24,
            norm_topk_prob=False,
            num_experts=8,
            num_experts_per_tok=3,
            shared_expert_intermediate_size=32,
            use_sliding_window=False,
        ),
        "olmoe": case(
            "olmoe",
            {"weights as they are": without(norm_topk_prob=True)} | qk_norms,
            head_dim=8,
            norm_topk_prob=False,
            num_experts=8,
            num_experts_per_tok=3,
        ),
        "granitemoe": case(
            "granitemoe",
            {
                name: without(**{name: plain})
                for name, plain in (
                    ("attention_multiplier", 16**-0.5),
                    ("embedding_multiplier", 1.0),
                    ("logits_scaling", 1.0),
                    ("residual_multiplier", 1.0),
                    ("num_experts_per_tok", 1),
                )
            },
            attention_multiplier=0.5,
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            num_experts_per_tok=3,
            num_local_experts=4,
            residual_multiplier=0.5,
        ),
        "ernie": case(
            "ernie4_5",
            {f"{part} bias": _zeroing(f"{part}_proj.bias") for part in ("k", "o", "up")},
            tie_word_embeddings=True,
            use_bias=True,
        ),
        "ernie-moe": case(
            "ernie4_5_moe",
            {
                "correction": _zeroing("e_score_correction_bias"),
                "shared experts": _zeroing("shared_experts.down_proj.weight"),
                "experts of a token": without(moe_k=1),
                "layer without experts": _zeroing("layers.0.mlp.down_proj.weight"),
                "experts' order": _with_experts_in_another_order,
            },
            moe_intermediate_size=12,
            moe_k=3,
            moe_layer_interval=1,
            moe_layer_start_index=1,
            moe_num_experts=8,
            moe_num_shared_experts=2,
            num_hidden_layers=3,
            tie_word_embeddings=True,
            use_bias=False,
        ),
        "cohere": case(
            "cohere",
            {
                "scale of logits": without(logit_scale=1.0),
                "norm weights": _filling("norm.weight", 1.0),
            },
            head_dim=8,
            layer_norm_eps=1e-5,
            logit_scale=0.25,
            tie_word_embeddings=True,
        ),
        "cohere2": case(
            "cohere2",
            {
                "window": without(sliding_window=64),
                "layer without RoPE": without(layer_types=["sliding_attention"] * 4),
                "scale of logits": without(logit_scale=1.0),
            },
            head_dim=8,
            layer_norm_eps=1e-5,
            logit_scale=0.25,
            num_hidden_layers=4,
            sliding_window=12,
            sliding_window_pattern=4,
            tie_word_embeddings=True,
        ),
        "exaone4": case(
            "exaone4",
            {
                "window": without(sliding_window=64),
                "layer without RoPE": without(layer_types=["sliding_attention"] * 4),
            }
            | qk_norms
            | output_norms,
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
            num_hidden_layers=4,
            sliding_window=12,
            sliding_window_pattern="LLLG",
        ),
        "cohere-norms": case(
            "cohere",
            qk_norms,
            head_dim=8,
            layer_norm_eps=1e-5,
            logit_scale=1.0,
            tie_word_embeddings=True,
            use_qk_norm=True,
        ),
        "apertus": case(
            "apertus",
            {
                "x^2": _filling("alpha_p", -10.0),
                "exp(x)": _filling("alpha_n", -10.0),
            }
            | qk_norms,
            hidden_act="xielu",
            rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        ),
        "granite-hybrid": case(
            "granitemoehybrid",
            {
                "residual_multiplier": without(residual_multiplier=1.0),
                "rotation": without(position_embedding_type=None),
            },
            attention_multiplier=0.5,
            embedding_multiplier=3.0,
            layer_types=["attention", "attention"],
            logits_scaling=2.0,
            mamba_n_heads=8,
            num_local_experts=0,
            position_embedding_type="rope",
            residual_multiplier=0.5,
            shared_intermediate_size=48,
        ),
        "helium": case("helium", {}, head_dim=8),
        # Logits are multiplied by what those of Granite are divided by.
        "hyperclovax": case(
            "hyperclovax",
            {
                name: without(**{name: 1.0})
                for name in ("embedding_multiplier", "logits_scaling", "residual_multiplier")
            }
            | {f"norm {number}": _filling(f"post_norm{number}.weight", 1.0) for number in (1, 2)},
            attention_multiplier=0.5,
            embedding_multiplier=3.0,
            logits_scaling=0.25,
            residual_multiplier=0.5,
        ),
        "vaultgemma": case(
            "vaultgemma",
            {
                "window": without(sliding_window=64),
                "norm": _filling("pre_feedforward_layernorm.weight", 1.0),
            },
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            query_pre_attn_scalar=16,
            sliding_window=12,
            tie_word_embeddings=True,
            **gemma,
        ),
        "hunyuan": case(
            "hunyuan_v1_dense",
            {
                "query norm": _filling("query_layernorm.weight", 1.0),
                "key norm": _filling("key_layernorm.weight", 1.0),
                "alpha": without(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
            },
            rope_scaling={"alpha": 50.0, "factor": 1.0, "type": "dynamic"},
            rope_theta=100.0,
        ),
        "hunyuan-moe": case(
            "hunyuan_v1_moe",
            {
                "key norm": _filling("key_layernorm.weight", 1.0),
                "shared expert": _zeroing("shared_mlp.down_proj.weight"),
                "experts' order": _with_experts_in_another_order,
            },
            moe_intermediate_size=[48, 48],
            moe_topk=[3, 3],
            num_experts=8,
            num_shared_expert=[1, 1],
        ),
        "internlm3": case("internlm3", biases, bias=True, qkv_bias=True, rope_scaling=_DYNAMIC),
        "stablelm": case(
            "stablelm",
            {f"{part} bias": _zeroing(f"{part}_proj.bias") for part in "qv"}
            | {"norm bias": _zeroing("norm.bias")},
            head_dim=8,
            layer_norm_eps=1e-5,
            partial_rotary_factor=0.25,
            use_qkv_bias=True,
        ),
        "stablelm-norms": case(
            "stablelm",
            {"norms of a head": _filling("norms.1.weight", 1.0)},
            head_dim=8,
            layer_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            qk_layernorm=True,
            use_parallel_residual=True,
        ),
        "starcoder2": case(
            "starcoder2",
            {f"{part} bias": _zeroing(f"{part}.bias") for part in ("c_fc", "c_proj", "o_proj")}
            | {"norm bias": _zeroing("norm.bias")},
            head_dim=8,
            hidden_act="gelu_pytorch_tanh",
            norm_epsilon=1e-5,
            sliding_window=4096,
            tie_word_embeddings=True,
            use_bias=True,
        ),
        "cwm": case(
            "cwm",
            {"window": without(sliding_window=64)},
            layer_types=["full_attention", "sliding_attention"],
            rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
            sliding_window=12,
        ),
        "exaone-moe": case(
            "exaone_moe",
            {
                "correction": _zeroing(_CORRECTION),
                "shared experts": _zeroing("shared_experts.down_proj.weight"),
                "layer without experts": _zeroing("layers.0.mlp.down_proj.weight"),
                "window": without(sliding_window=64),
                "scale": without(routed_scaling_factor=1.0),
            }
            | qk_norms,
            first_k_dense_replace=1,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            moe_intermediate_size=16,
            n_group=1,
            norm_topk_prob=True,
            num_experts=8,
            num_experts_per_tok=3,
            num_hidden_layers=3,
            num_shared_experts=1,
            routed_scaling_factor=2.5,
            sliding_window=12,
            topk_group=1,
        ),
        "hunyuan-3": case(
            "hy_v3",
            {
                "correction": _zeroing(_CORRECTION),
                "shared experts": _zeroing("shared_experts.down_proj.weight"),
                "scale": without(router_scaling_factor=1.0),
            }
            | qk_norms,
            first_k_dense_replace=1,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=3,
            num_shared_experts=1,
            router_scaling_factor=2.5,
        ),
        "iquest-coder": case("iquestcoder", {}),
        "jais2": case(
            "jais2",
            {
                "norm bias": _zeroing("norm.bias"),
                "up bias": _zeroing("up_proj.bias"),
                "output bias": _zeroing("o_proj.bias"),
            },
            attention_bias=True,
            hidden_act="relu2",
            layer_norm_eps=1e-5,
            mlp_bias=True,
        ),
        "solar-open": case(
            "solar_open",
            {
                "correction": _zeroing(_CORRECTION),
                "shared experts": _zeroing("shared_experts.down_proj.weight"),
                "scale": without(routed_scaling_factor=1.0),
            },
            moe_intermediate_size=16,
            n_group=1,
            n_routed_experts=8,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=3,
            partial_rotary_factor=1.0,
            routed_scaling_factor=2.5,
            topk_group=1,
        ),
        "arcee": case("arcee", {}, attention_bias=False, hidden_act="relu2", mlp_bias=False),
        "dots1": case(
            "dots1",
            {
                "correction": _zeroing("e_score_correction_bias"),
                "shared experts": _zeroing("shared_experts.down_proj.weight"),
                "scale": without(routed_scaling_factor=1.0),
            }
            | qk_norms,
            first_k_dense_replace=1,
            moe_intermediate_size=16,
            n_group=1,
            n_routed_experts=8,
            n_shared_experts=2,
            norm_topk_prob=True,
            num_experts_per_tok=3,
            routed_scaling_factor=2.5,
            sliding_window=None,
            topk_group=1,
        ),
    }


_OLDER = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.": "",
}
_NEWER = {"model.": "model."}
"""How files of models that see images name their parameters: as most of them were published, and as
modules are called since transformers 4.52."""

_CORRECTION = "e_score_correction_bias"
_ACTIVATIONS = ("act_fn.beta", "act_fn.eps")
"""Numbers of activations that files have."""
_DYNAMIC = {"factor": 6.0, "rope_type": "dynamic"}
_GLM = {"attention_bias": True, "partial_rotary_factor": 0.5}


def make(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Writes one checkpoint and its logits.

    Returns:
      What `made_with.json` says of it: spread of the logits and the effect of every ablation.

    Raises:
      RuntimeError: an ablation moves no logit by more than `LEAST_EFFECT`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    _write_json(folder / "config.json", case.config)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = _class_of(config).from_config(config)
    tensors = {
        _stored_name(parameter, case): _draw(parameter, value.shape, rng).to(case.dtype)
        for parameter, value in sorted(_drawn(model))
    }
    tensors |= {
        name: value.to(case.dtype)
        for name, value in model.named_buffers()
        if name.endswith(_ACTIVATIONS)
    }
    if case.turned:
        turned = {n: t.mT.contiguous() if ".experts." in n else t for n, t in tensors.items()}
        save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _save(model, tensors, folder / "model.safetensors")
    vocabulary = 60 if case.prefixes else config.vocab_size  # those behind stand for images
    tokens = rng.integers(0, vocabulary, (ROWS, POSITIONS), dtype=np.int32)
    logits = _logits(_load(folder), tokens)
    np.savez_compressed(folder / "logits.npz", tokens=tokens, logits=logits)
    effects = {
        what: float(np.abs(_logits(ablate(_load(folder)), tokens) - logits).max())
        for what, ablate in case.ablations.items()
    }
    if weak := [what for what, effect in effects.items() if effect < LEAST_EFFECT]:
        raise RuntimeError(f"{name}: logits hardly depend on {', '.join(weak)}: {effects}")
    return {
        "logits_standard_deviation": round(float(logits.std()), 4),
        "largest_logit_change_without": {what: round(e, 4) for what, e in effects.items()},
    }


def _save(
    model: transformers.PreTrainedModel, tensors: dict[str, torch.Tensor], file: Path
) -> None:
    """Writes tensors as published files have them: expert by expert, where a model joins these."""
    if not any(".experts." in name for name in tensors):
        save_file(tensors, file, metadata={"format": "pt"})
        return
    model.load_state_dict(tensors, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        model.to(next(iter(tensors.values())).dtype).save_pretrained(folder)
        shutil.copyfile(Path(folder) / file.name, file)


def _drawn(model: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the biases of choices, which are buffers."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(_CORRECTION):
            yield name, buffer


def _draw(parameter: str, shape: torch.Size, rng: np.random.Generator) -> torch.Tensor:
    if parameter.endswith("norm.weight"):
        values = rng.uniform(0.5, 1.5, shape)
    else:
        values = rng.normal(0.0, BIAS_SCALE if parameter.endswith("bias") else WEIGHT_SCALE, shape)
    return torch.from_numpy(values.astype(np.float32))


def _stored_name(parameter: str, case: Case) -> str:
    for prefix, instead in case.prefixes.items():
        if parameter.startswith(prefix):
            return instead + parameter.removeprefix(prefix)
    return parameter


def _class_of(config: transformers.PreTrainedConfig) -> Any:
    sees = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def _load(folder: Path) -> transformers.PreTrainedModel:
    """The model of a folder.

    Raises:
      RuntimeError: not every parameter is in the file.
    """
    auto = _class_of(transformers.AutoConfig.from_pretrained(folder))
    model, report = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        raise RuntimeError(f"{folder}: {report}")
    return model.eval()


@torch.no_grad()
def _logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def _rebuilt(model: transformers.PreTrainedModel, **changes: Any) -> transformers.PreTrainedModel:
    """The same weights under a changed configuration."""
    config = type(model.config).from_dict(model.config.to_dict() | changes)
    config._attn_implementation = "eager"
    rebuilt = type(model)(config).eval()
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt


def _without_rope_scaling(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    theta = model.config.rope_parameters["rope_theta"]
    return _rebuilt(model, rope_parameters={"rope_theta": theta, "rope_type": "default"})


def _without_rope_band(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    rope = model.config.rope_parameters
    no_band = {"low_freq_factor": rope["high_freq_factor"] - 1e-3}
    return _rebuilt(model, rope_parameters=rope | no_band)


def _with_default_theta(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    return _rebuilt(model, rope_parameters=model.config.rope_parameters | {"rope_theta": 10000.0})


def _with_default_rope(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0}
    return _rebuilt(model, rope_parameters=rope, partial_rotary_factor=1.0)


def _without_attention_factor(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    return _rebuilt(model, rope_parameters=model.config.rope_parameters | {"attention_factor": 1.0})


def _with_tied_head(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    head = model.get_output_embeddings()
    assert head is not None
    head.weight.data = model.get_input_embeddings().weight.data
    return model


def _with_experts_in_another_order(
    model: transformers.PreTrainedModel,
) -> transformers.PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("experts.down_proj"):
            parameter.data = parameter.data.roll(1, dims=0)
    return model


def _filling(
    suffix: str, value: float
) -> Callable[[transformers.PreTrainedModel], transformers.PreTrainedModel]:
    def fill(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
        for name, parameter in _drawn(model):
            if name.endswith(suffix):
                parameter.data.fill_(value)
        return model

    return fill


def _zeroing(
    suffix: str,
) -> Callable[[transformers.PreTrainedModel], transformers.PreTrainedModel]:
    return _filling(suffix, 0.0)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write (%(default)s)")
    out = parser.parse_args().out
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # one order of summation, so a rerun gives the same bits
    made = {name: make(name, case, out / name) for name, case in (cases() | small_cases()).items()}
    _write_json(
        out / "made_with.json",
        {
            "script": "tests/oracle/make_logits.py",
            "date": datetime.date.today().isoformat(),
            "numpy": np.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "checkpoints": made,
        },
    )


if __name__ == "__main__":
    main()
