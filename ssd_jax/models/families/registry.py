"""All families by their `model_type`, and what models of others would need."""

from __future__ import annotations

from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.models.families.apertus import APERTUS
from ssd_jax.models.families.arcee import ARCEE
from ssd_jax.models.families.cohere import COHERE, COHERE2
from ssd_jax.models.families.cwm import CWM
from ssd_jax.models.families.dots import DOTS1
from ssd_jax.models.families.ernie import ERNIE, ERNIE_MOE
from ssd_jax.models.families.exaone import EXAONE4, EXAONE_MOE
from ssd_jax.models.families.family import Family
from ssd_jax.models.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT, VAULTGEMMA
from ssd_jax.models.families.glm import GLM, GLM4, GLM4_MOE
from ssd_jax.models.families.gpt_oss import GPT_OSS
from ssd_jax.models.families.granite import GRANITE, GRANITE_HYBRID, GRANITE_MOE, HYPERCLOVAX
from ssd_jax.models.families.helium import HELIUM
from ssd_jax.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE, HUNYUAN_V3
from ssd_jax.models.families.internlm3 import INTERNLM3
from ssd_jax.models.families.jais import JAIS2
from ssd_jax.models.families.llama import IQUEST_CODER, LLAMA
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
from ssd_jax.models.families.solar import SOLAR_OPEN
from ssd_jax.models.families.stablelm import STABLELM
from ssd_jax.models.families.starcoder2 import STARCODER2
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
        GRANITE_HYBRID,
        GRANITE_MOE,
        HYPERCLOVAX,
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
        HUNYUAN,
        HUNYUAN_MOE,
        HUNYUAN_V3,
        EXAONE_MOE,
        SOLAR_OPEN,
        APERTUS,
        CWM,
        IQUEST_CODER,
        JAIS2,
        INTERNLM3,
        HELIUM,
        STABLELM,
        STARCODER2,
        GEMMA,
        GEMMA2,
        VAULTGEMMA,
        GEMMA3_TEXT,
        GEMMA3,
    )
}

ARCHITECTURES = {
    family.gguf.name: (family.name, family.gguf)
    for family in FAMILIES.values()
    if family.gguf is not None
}
"""By llama.cpp's name of an architecture, the `model_type` of its files and what they have."""

SWITCHES = {"llama": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
"""Families of a draft that is trained from scratch, and what they switch in a `ModelConfig`."""

MISSING = {
    "experts that are chosen by sparsemixer": "phimoe",
    "attention in chunks, and the text part of models that see images": "llama4",
    "latent attention (MLA)": "axk1 minicpm3 youtu",
    "experts and latent attention (MLA)": "deepseek2 deepseek_v2 deepseek_v3 deepseek_v32 "
    "glm4_moe_lite glm_moe_dsa hy_v4 kimi_k2 kimi_k25 longcat_flash mistral4 mistral_large4",
    "attention to chosen blocks of tokens": "deepseek_v4 minimax_m3_vl step3p7",
    "linear attention or state spaces": "bailing_hybrid bamba falcon-h1 falcon_h1 falcon_mamba "
    "glm5_next granitehybrid jamba kimi-linear kimi_linear lfm2 lfm2_moe lfm2moe lfm3 mamba mamba2 "
    "minimax nemotron_h nemotron_h_moe olmo_hybrid qwen35 qwen35moe qwen3_5 qwen3_5_moe qwen3_next "
    "qwen3next qwen4_exp recurrent_gemma zamba2",
    "gates of what attention gives": "afmoe laguna muse_glimmer",
    "values of another width than keys": "mimo2 mimo_v2_flash",
    "layers that share keys and values, or with inputs of their own": "gemma3n gemma4",
    "attention to images": "mllama",
    "the text part of models that see images": "exaone4_5 glm4v glm4v_moe internvl llava "
    "phi4_multimodal smolvlm",
    "norms without weights": "olmo",
    "attention and feed-forward side by side behind two norms": "falcon gpt_neox gptneox",
    "a head with biases": "gptj phi phi2",
    "learned positions": "gpt2 gpt_bigcode gpt_neo opt starcoder",
    "layers of several shapes": "deci nemotron-nas openelm",
}
"""What this package would have to have for other models, by their `model_type`, or by llama.cpp's
name of their architecture where that is another one."""


def family_of(model_type: Any, source: str) -> Family:
    """The family of a `model_type`.

    Raises:
      InputError: there is none; the error says what is missing, if that is known.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise InputError(
        f"{source}: model_type {shown(model_type)} is not supported{needs(model_type)}; "
        f"supported: {', '.join(FAMILIES)}"
    )


def needs(name: Any) -> str:
    """What a model would need, in brackets; empty if that is not known.

    Args:
      name: a `model_type`, or llama.cpp's name of an architecture.
    """
    missing = next((part for part, types in MISSING.items() if name in types.split()), "")
    return f" (it needs {missing})" if missing else ""
