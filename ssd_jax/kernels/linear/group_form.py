"""How weights in groups of inputs are stored, for products by XLA; see `groups.py`."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class GroupForm:
    """How the values of a weight are stored.

    Attributes:
      dtype: of the values: "int4", "int8" or "float8_e4m3fn".
      group: inputs that share a scale.
      minima: whether groups have a minimum.
    """

    dtype: str
    group: int
    minima: bool = False

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
