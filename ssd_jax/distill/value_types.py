"""Types of settings with their limits, which msgspec checks."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ssd_jax.settings import MAX_BUDGET, MAX_K
from ssd_jax.speculation.fan_out import LEAST_BUDGET

# A description goes on where an error has named key and value.
NotNegative = Annotated[int, Meta(ge=0, description="must be at least 0")]
Count = Annotated[int, Meta(ge=1, description="must be at least 1")]
Several = Annotated[int, Meta(ge=2, description="must be at least 2")]
Share = Annotated[float, Meta(ge=0, lt=1, description="must be at least 0 and below 1")]
Amount = Annotated[float, Meta(ge=0, description="must be at least 0")]
Positive = Annotated[float, Meta(gt=0, description="must be above 0")]
Compute = Literal["bfloat16", "float32"]
Part = Literal["frozen", "trained"]
Temperatures = Annotated[
    tuple[float, ...], Meta(min_length=1, description="must be a list of at least one number")
]
HeldOutSets = Annotated[tuple[str, ...], Meta(description="must be a list of held-out sets")]
Ks = Annotated[
    tuple[Annotated[int, Meta(ge=1, le=MAX_K)], ...],
    Meta(min_length=1, description=f"must list integers from 1 to {MAX_K}"),
]
Budgets = Annotated[
    tuple[Annotated[int, Meta(ge=LEAST_BUDGET, le=MAX_BUDGET)], ...],
    Meta(min_length=1, description=f"must list integers from {LEAST_BUDGET} to {MAX_BUDGET}"),
]
