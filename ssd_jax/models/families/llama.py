"""Llama 2 and 3, and what has their architecture: SmolLM2, Yi, Falcon 3, DeepSeek's distilled ones,
and IQuest-Coder under another name."""

from ssd_jax.models.families.family import Family, biases

LLAMA = Family(name="llama", read=biases)
IQUEST_CODER = Family(name="iquestcoder", read=biases, defaults={"head_dim": 128})
