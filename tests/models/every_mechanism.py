"""Changes to a tiny config.json that switch mechanisms on."""

from typing import Any

from ssd_jax.models.config import KEY

EVERY_MECHANISM = {
    "num_hidden_layers": 3,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.5,
    },
    KEY: {
        "qkv_bias": True,
        "qk_norm": True,
        "rotary_dim": 4,
        "output_bias": True,
        "mlp_bias": True,
        "joint_qk_norm": True,
        "norm_placement": "both",
        "activation": "gelu_pytorch_tanh",
        "gate_limit": 1.5,
        "layer_kinds": ["full", "nope", "window"],
        "window": 24,
        "window_rope_theta": 500.0,
        "score_soft_cap": 8.0,
        "multipliers": {"embedding": 3.0, "residual": 0.5, "scores": 0.5, "logits": 0.5},
        "logit_soft_cap": 20.0,
        "sinks": True,
    },
}
"""All that one decoder can have."""

OTHER_NORMS = {
    KEY: {
        "qkv_bias": False,
        "qk_norm": False,
        "norm_placement": "post",
        "layer_norm": True,
        "activation": "relu2",
        "gated": False,
    }
}
"""What excludes some of these."""

SIDE_BY_SIDE = {
    "num_hidden_layers": 3,
    KEY: {
        "qkv_bias": False,
        "qk_norm": True,
        "head_qk_norm": True,
        "late_qk_norm": True,
        "parallel": True,
        "layer_norm": True,
        "norm_bias": False,
        "activation": "xielu",
        "gated": False,
        "layer_kinds": ["window", "nope", "window"],
        "window": 24,
    },
}
"""Attention and feed-forward behind one norm, with norms of heads."""

EXPERTS = {
    "num_hidden_layers": 3,
    KEY: {
        "qkv_bias": False,
        "qk_norm": True,
        "experts": {
            "count": 6,
            "chosen": 2,
            "intermediate": 24,
            "scoring": "sigmoid",
            "scale": 2.5,
            "correction": True,
            "router_bias": True,
            "biases": True,
            "shared": 16,
            "shared_gate": True,
            "dense_layers": [0],
        },
    },
}
"""All that a feed-forward of experts can have, behind a layer without."""

AT_ONCE = EVERY_MECHANISM | {KEY: EVERY_MECHANISM[KEY] | {"experts": EXPERTS[KEY]["experts"]}}
"""Every mechanism in a decoder with experts."""


def in_windows(window: int) -> dict[str, Any]:
    """The same where every layer sees so many tokens, so that texts give pages back."""
    layers = {"layer_kinds": ["window"] * 3, "window": window}
    return AT_ONCE | {KEY: AT_ONCE[KEY] | layers}


FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        "attention_bias": True,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "truncate": False,
        },
        "sliding_window": 24,
        "swiglu_limit": 1.0,
    },
    "minimax_m2": {"num_experts_per_tok": 3, "num_local_experts": 6, "rotary_dim": 4},
    "phi3": {
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1],
            "long_factor": [1.5, 3.0],
        },
    },
}
"""Lines with mechanisms, as their own config.json says it."""
