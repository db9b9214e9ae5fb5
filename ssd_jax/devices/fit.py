"""Whether what models hold fits a memory: bytes by their use, beside a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ssd_jax.devices.paged_programs import Paging
from ssd_jax.devices.passes import history_structs
from ssd_jax.models.functional import FunctionalModel

Parts = dict[str, int]
"""Bytes by their use."""


class Need(NamedTuple):
    """The parts that one memory must hold.

    Attributes:
      limit: bytes that it may hold.
      whose: name of the memory, for messages.
    """

    parts: Parts
    limit: int
    whose: str

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the memory holds them."""
        return self.total <= self.limit


class ModelBytes(NamedTuple):
    """Bytes that a model holds while it serves an engine, beside its programs.

    Attributes:
      pages: keys and values of all slots.
      records: of the past tokens of all slots.
    """

    weights: int
    pages: int
    records: int

    @classmethod
    def of(
        cls, model: FunctionalModel, *, slots: int, paging: Paging, size_of: Callable[[Any], int]
    ) -> ModelBytes:
        """Counts a model's arrays with `size_of`, see `sizes`, from structs; nothing is loaded."""
        return cls(
            weights=size_of(model.parameter_structs()),
            pages=size_of(model.page_struct(paging.total, paging.size)),
            records=size_of(history_structs(model, slots)),
        )
