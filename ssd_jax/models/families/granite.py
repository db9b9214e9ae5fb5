"""Granite 3: llama with four multipliers; the smaller ones have experts."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import ExpertArrays, Family, TensorLayout, biases
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


GRANITE = Family(name="granite", read=_read)
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
)
