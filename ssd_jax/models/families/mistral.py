"""Mistral 7B, Nemo, Small, Large, Ministral; the text part of Small 3.1 and later; Mixtral."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    MIXTRAL_EXPERTS,
    NEIGHBOURS,
    TEXT_PREFIXES,
    Family,
    GgufArchitecture,
    TensorLayout,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.gguf_rope import FREQUENCIES, rope_scaling
from ssd_jax.models.families.windows import windows
from ssd_jax.models.mechanisms import Experts


def _mixtral(config: ConfigReader) -> dict[str, Any]:
    experts = Experts(
        count=config.count("num_local_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
    )
    return windows(config) | {"experts": experts}


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    if not keys.get("attention.temperature_scale"):
        keys.require("rope.scaling.type", (None, "none"))  # older llama.cpp has no factor of YaRN
        return {}
    keys.require("rope.scaling.type", ("yarn",))
    weights = {"mscale": 1.0, "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier")}
    growth = {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    scaling = (rope_scaling(keys) or {}) | weights | growth
    return {"model_type": "ministral3", "rope_scaling": scaling}


MISTRAL = Family(
    name="mistral",
    read=windows,
    gguf=GgufArchitecture(name="mistral3", read=_gguf, layout=NEIGHBOURS, divisors=(FREQUENCIES,)),
)
MINISTRAL = Family(name="ministral", read=windows)
MINISTRAL3 = Family(name="ministral3", read=windows)
MISTRAL3 = Family(
    name="mistral3", read=windows, part="text_config", layout=TensorLayout(prefixes=TEXT_PREFIXES)
)
MIXTRAL = Family(
    name="mixtral",
    read=_mixtral,
    defaults={"rope_theta": 1e6},
    layout=TensorLayout(
        modules={"block_sparse_moe.gate": ("mlp.router",)},
        experts=MIXTRAL_EXPERTS,
    ),
)
