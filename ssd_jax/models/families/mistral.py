"""Mistral 7B, Nemo, Small, Large, Ministral 8B; the text part of Small 3.1 and later."""

from ssd_jax.models.families.family import TEXT_PREFIXES, Family, TensorLayout
from ssd_jax.models.families.windows import windows

MISTRAL = Family(name="mistral", read=windows)
MINISTRAL = Family(name="ministral", read=windows)
MISTRAL3 = Family(
    name="mistral3", read=windows, part="text_config", layout=TensorLayout(prefixes=TEXT_PREFIXES)
)
