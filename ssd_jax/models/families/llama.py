"""Llama 2 and 3, and what has their architecture: SmolLM2, Yi, DeepSeek's distilled ones."""

from ssd_jax.models.families.family import Family, biases

LLAMA = Family(name="llama", read=biases)
