"""Granite 3 and 4: llama with four multipliers; some of Granite 3 have experts.

HyperCLOVA X has norms after attention and feed-forward, too.
"""

import dataclasses
from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    NEIGHBOURS,
    ExpertArrays,
    Family,
    GgufArchitecture,
    TensorLayout,
    biases,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.mechanisms import Experts, Multipliers


def _read(config: ConfigReader) -> dict[str, Any]:
    multipliers = Multipliers(
        embedding=float(config.positive("embedding_multiplier", 1.0)),
        residual=float(config.positive("residual_multiplier", 1.0)),
        scores=float(config.positive("attention_multiplier", 1.0)),
        logits=1 / config.positive("logits_scaling", 1.0),
    )
    return biases(config) | {"multipliers": multipliers}


def _read_moe(config: ConfigReader) -> dict[str, Any]:
    experts = Experts(
        count=config.count("num_local_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
    )
    return _read(config) | {"experts": experts}


def _read_hybrid(config: ConfigReader) -> dict[str, Any]:
    """Those of Granite 4 whose layers all have attention."""
    layers, attention = config.count("num_hidden_layers"), {"attention", "full_attention"}
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"]
    if others := sorted({*kinds} - attention):
        raise config.unsupported("layer_types", others[0], "it needs linear attention")
    if config.get("num_local_experts"):
        raise config.unsupported("num_local_experts", config.get("num_local_experts"))
    key = "position_embedding_type"
    if config.get(key) not in ("rope", "nope", None):
        raise config.unsupported(key, config.get(key))
    rotated = {} if config.get(key) == "rope" else {"layer_kinds": ("nope",) * layers}
    return _read(config) | rotated | {"intermediate_size": config.count("shared_intermediate_size")}


def _read_hyperclovax(config: ConfigReader) -> dict[str, Any]:
    """Logits are multiplied, not divided, by `logits_scaling`; scores are scaled as usual if the
    file does not say how."""
    scores, read = config.get("attention_multiplier"), _read(config)
    multipliers = dataclasses.replace(
        read["multipliers"],
        scores=None if scores is None else float(scores),
        logits=float(config.positive("logits_scaling", 1.0)),
    )
    norms = "both" if config.flag("use_post_norm", default=True) else "pre"
    return read | {"multipliers": multipliers, "norm_placement": norms}


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    keys.require("rope.scaling.finetuned", (None, True))  # false is a decoder without RoPE
    settings = {
        name: keys.number(key)
        for key, name in (
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
        )
        if keys.get(key)
    }
    return {
        "attention_multiplier": keys.head_dim**-0.5,
        "logits_scaling": keys.number("logit_scale"),
        **settings,
    }


def _gguf_moe(keys: GgufKeys) -> dict[str, Any]:
    return _gguf(keys) | keys.experts("num_local_experts")


GRANITE = Family(
    name="granite",
    read=_read,
    gguf=GgufArchitecture(name="granite", read=_gguf, layout=NEIGHBOURS),
)
HYPERCLOVAX = Family(
    name="hyperclovax",
    read=_read_hyperclovax,
    layout=TensorLayout(
        modules={"post_norm1": ("attention_output_norm",), "post_norm2": ("mlp_output_norm",)}
    ),
)
GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    read=_read_hybrid,
    layout=TensorLayout(
        modules={
            "shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj"),
            "shared_mlp.output_linear": ("mlp.down_proj",),
        }
    ),
)
GRANITE_MOE = Family(
    name="granitemoe",
    read=_read_moe,
    layout=TensorLayout(
        modules={"block_sparse_moe.router.layer": ("mlp.router",)},
        expert_arrays=ExpertArrays(
            modules={
                "block_sparse_moe.input_linear": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
                "block_sparse_moe.output_linear": ("mlp.experts.down_proj",),
            }
        ),
    ),
    gguf=GgufArchitecture(name="granitemoe", read=_gguf_moe, layout=NEIGHBOURS),
)
