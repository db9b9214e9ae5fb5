"""How weights in groups of inputs are stored, for products by XLA; see `groups.py`."""

from __future__ import annotations

import dataclasses
import math

FLOAT4 = "float4_e2m1fn"
"""Floats of four bits, as MXFP4 has them: scales are powers of two."""
LEAST_EXPONENT, LARGEST_EXPONENT = 2, 252
"""Of a scale in MXFP4, plus 127: all values are normal numbers of float32."""


@dataclasses.dataclass(frozen=True)
class GroupForm:
    """How the values of a weight are stored.

    Attributes:
      dtype: of the values: "int4", "int8" or "float8_e4m3fn"; `FLOAT4` of experts.
      group: inputs that share a scale.
      minima: whether groups have a minimum.
    """

    dtype: str
    group: int
    minima: bool = False

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 4 if self.dtype in ("int4", FLOAT4) else 8

    def joined(self, other: GroupForm) -> GroupForm | None:
        """The form that holds weights of both; None if there is none."""
        dtypes = {self.dtype, other.dtype}
        if len(dtypes) > 1 and dtypes != {"int4", "int8"}:
            return None
        dtype = "int8" if len(dtypes) > 1 else self.dtype
        return GroupForm(dtype, math.gcd(self.group, other.group), self.minima or other.minima)

    def widened(self) -> GroupForm:
        """The form with int8 for int4."""
        return dataclasses.replace(self, dtype=self.dtype.replace("int4", "int8"))

    def divided(self, inputs: int) -> GroupForm:
        """The form whose groups also divide so many inputs."""
        return dataclasses.replace(self, group=math.gcd(self.group, inputs))
