"""Branches on a draft's devices, which programs return packed in one array."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.devices.programs import device
from ssd_jax.roles.protocols import ExpansionAnswer
from ssd_jax.roles.records import BranchTokens


class PackedBranches(ExpansionAnswer):
    """Branches as a draft's programs return them after each forward.

    Args:
      packed: those of the first forward.
    """

    def __init__(self, packed: jax.Array) -> None:
        self._on_device, self._forwards = packed, 1
        self._on_host: BranchTokens | None = None

    def grow(self) -> None:
        """Runs one more forward of all branches."""
        packed = self._grown(self._forwards)
        self._on_device = self._on_device if packed is None else packed
        self._forwards += 1

    def begin_read(self) -> None:
        """Begins to copy the branches to the host, as far as they were dispatched."""
        device.begin_read(self._on_device)

    def ready(self) -> bool:
        """Whether the branches are there, so that `branches` does not wait."""
        return self._on_device.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def branches(self, forwards: int, until: Callable[[], bool] | None = None) -> BranchTokens:
        """Waits for all that was dispatched: on the target's devices the outcome comes behind."""
        if self._on_host is None or self._on_host.forwards != self._forwards:
            self._on_host = self._read()
        return self._on_host

    def _read(self) -> BranchTokens:
        return self._unpacked(device.read(self._on_device), self._forwards)

    @abstractmethod
    def _grown(self, forwards: int) -> jax.Array | None:
        """Dispatches one more forward behind so many; None where there is nothing more to run."""

    @abstractmethod
    def _unpacked(
        self, packed: Int32[np.ndarray, "B branches columns"], forwards: int
    ) -> BranchTokens:
        """The branches that so many forwards have made."""
