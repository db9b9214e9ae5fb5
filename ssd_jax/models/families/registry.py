"""All families by their `model_type`, and what models of others would need."""

from __future__ import annotations

from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.models.families.arcee import ARCEE
from ssd_jax.models.families.cohere import COHERE, COHERE2
from ssd_jax.models.families.dots import DOTS1
from ssd_jax.models.families.ernie import ERNIE, ERNIE_MOE
from ssd_jax.models.families.exaone import EXAONE4
from ssd_jax.models.families.family import Family
from ssd_jax.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT
from ssd_jax.models.families.glm import GLM, GLM4, GLM4_MOE
from ssd_jax.models.families.gpt_oss import GPT_OSS
from ssd_jax.models.families.granite import GRANITE, GRANITE_MOE
from ssd_jax.models.families.llama import LLAMA
from ssd_jax.models.families.minimax import MINIMAX_M2
from ssd_jax.models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MISTRAL3, MIXTRAL
from ssd_jax.models.families.nemotron import NEMOTRON
from ssd_jax.models.families.olmo import OLMO2, OLMO3, OLMOE
from ssd_jax.models.families.phi3 import PHI3
from ssd_jax.models.families.qwen import (
    QWEN2,
    QWEN2_5_VL,
    QWEN2_MOE,
    QWEN2_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from ssd_jax.models.families.seed_oss import SEED_OSS
from ssd_jax.models.families.smollm3 import SMOLLM3
from ssd_jax.system.files import shown

FAMILIES = {
    family.name: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        QWEN3_VL_MOE,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        MISTRAL3,
        MIXTRAL,
        SMOLLM3,
        GRANITE,
        GRANITE_MOE,
        PHI3,
        OLMO2,
        OLMO3,
        OLMOE,
        GLM,
        GLM4,
        GLM4_MOE,
        GPT_OSS,
        MINIMAX_M2,
        DOTS1,
        ERNIE,
        ERNIE_MOE,
        COHERE,
        COHERE2,
        EXAONE4,
        ARCEE,
        SEED_OSS,
        NEMOTRON,
        GEMMA,
        GEMMA2,
        GEMMA3_TEXT,
        GEMMA3,
    )
}

SWITCHES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
"""Families of a draft that is trained from scratch, and what they switch in a `ModelConfig`."""

MISSING = {
    "experts that are chosen by sparsemixer": "phimoe",
    "attention in chunks, and the text part of models that see images": "llama4",
    "experts and latent attention (MLA)": "deepseek_v2 deepseek_v3 deepseek_v32 "
    "glm4_moe_lite glm_moe_dsa kimi_k2",
    "linear attention or state spaces": "falcon_h1 granitemoehybrid kimi_linear lfm2 mamba minimax "
    "nemotron_h qwen3_5 qwen3_5_moe qwen3_next",
    "the text part of models that see images": "gemma3n mllama",
    "attention and feed-forward side by side": "falcon gpt_neox gptj phi",
    "learned positions": "gpt2 gpt_neo opt",
    "layers of several shapes": "nemotron-nas openelm",
}
"""What this package would have to have for other models, by their `model_type`."""


def family_of(model_type: Any, source: str) -> Family:
    """The family of a `model_type`.

    Raises:
      InputError: there is none; the error says what is missing, if that is known.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    missing = next((part for part, types in MISSING.items() if model_type in types.split()), None)
    raise InputError(
        f"{source}: model_type {shown(model_type)} is not supported"
        f"{f' (it needs {missing})' if missing else ''}; supported: {', '.join(FAMILIES)}"
    )
