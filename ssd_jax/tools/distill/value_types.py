"""Numbers of settings with their limits, which msgspec checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

# A description continues an error that has named key and value.
NotNegative = Annotated[int, Meta(ge=0, description="must be at least 0")]
Count = Annotated[int, Meta(ge=1, description="must be at least 1")]
Several = Annotated[int, Meta(ge=2, description="must be at least 2")]
Passage = Annotated[int, Meta(ge=16, description="must be at least 16")]
Fraction = Annotated[float, Meta(ge=0, lt=1, description="must be at least 0 and below 1")]
Amount = Annotated[float, Meta(ge=0, description="must be at least 0")]
Positive = Annotated[float, Meta(gt=0, description="must be above 0")]
