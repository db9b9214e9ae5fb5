"""Llama 2 and 3, and what has their architecture: SmolLM2, Yi, Falcon 3, DeepSeek's distilled ones,
and IQuest-Coder under another name."""

from typing import Any

from ssd_jax.models.families.family import NEIGHBOURS, Family, GgufArchitecture, biases
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.gguf_rope import FREQUENCIES


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    if not keys.get("expert_count"):
        return {}
    return {"model_type": "mixtral", **keys.experts("num_local_experts")}


LLAMA = Family(
    name="llama",
    read=biases,
    gguf=GgufArchitecture(name="llama", read=_gguf, layout=NEIGHBOURS, divisors=(FREQUENCIES,)),
)
IQUEST_CODER = Family(name="iquestcoder", read=biases, defaults={"head_dim": 128})
