"""Solar Open: llama with DeepSeek-V3's experts."""

from ssd_jax.models.families.family import (
    EXPERTS_APART,
    SHARED_EXPERTS,
    Family,
    TensorLayout,
    sigmoid_experts,
)

SOLAR_OPEN = Family(
    name="solar_open",
    read=sigmoid_experts,
    defaults={"rope_theta": 1e6, "head_dim": 128, "norm_topk_prob": True},
    layout=TensorLayout(
        modules={"mlp.gate": ("mlp.router",)} | SHARED_EXPERTS, experts=EXPERTS_APART
    ),
)
