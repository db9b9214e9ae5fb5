"""Mistral 7B, Nemo, Small, Large, Ministral; the text part of Small 3.1 and later; Mixtral."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import MIXTRAL_EXPERTS, TEXT_PREFIXES, Family, TensorLayout
from ssd_jax.models.families.windows import windows
from ssd_jax.models.mechanisms import Experts


def _mixtral(config: ConfigReader) -> dict[str, Any]:
    experts = Experts(
        count=config.count("num_local_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
    )
    return windows(config) | {"experts": experts}


MISTRAL = Family(name="mistral", read=windows)
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
