"""Whether what models hold fits a memory: bytes by their use, beside a limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.passes import history_structs
from ssd_jax.models.functional import FunctionalModel

Parts = dict[str, int]
"""Bytes by their use."""


class Need(NamedTuple):
    """The parts that one memory must hold.

    Attributes:
      limit: bytes that it may hold.
      memory: name of the memory, for messages.
    """

    parts: Parts
    limit: int
    memory: str

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the memory holds them."""
        return self.total <= self.limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes that a model holds while it serves an engine, beside its programs.

    They are counted from structs, so that nothing need be loaded and no device be there.

    Attributes:
      slots: of the engine.
      paging: all its pages.
      size_of: counts structs, per device or of all in this process; see `sizes`.
    """

    model: FunctionalModel
    slots: int
    paging: Paging
    size_of: Callable[[Any], int]

    @property
    def weights(self) -> int:
        """The parameters."""
        return self.size_of(self.model.parameter_structs())

    @property
    def pages(self) -> int:
        """Keys and values of all pages."""
        return self.size_of(self.model.page_struct(self.paging.total, self.paging.size))

    @property
    def records(self) -> int:
        """Records of the past tokens of all slots."""
        return self.size_of(history_structs(self.model, self.slots))
