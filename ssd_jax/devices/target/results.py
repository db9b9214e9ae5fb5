"""Results of a target that are still on their way from its devices."""

from __future__ import annotations

import jax
import numpy as np
from typing_extensions import override

from ssd_jax.devices.programs import device
from ssd_jax.roles.protocols import Pending, PendingLogprobs
from ssd_jax.roles.records import Outcomes, TopLogprobs
from ssd_jax.sampling.logprobs import Logprobs


class PendingOutcome(Pending):
    """Outcomes of a verification on their way from the device.

    Args:
      packed: outcomes [rows, w + 2], see `programs.Programs`.
      bonus: bonus tokens [rows].
      logprobs: of the emitted tokens, if a request asks for them.
      tree: whether the outcomes are those of trees, which end with a node.
      batch: see `Outcomes`.
    """

    def __init__(
        self,
        packed: jax.Array,
        bonus: jax.Array,
        logprobs: Logprobs | None,
        *,
        tree: bool = False,
        batch: int = 0,
    ) -> None:
        self._packed, self._bonus = packed, bonus
        self._logprobs, self._tree, self._batch = logprobs, tree, batch
        for array in jax.tree.leaves((packed, logprobs)):
            device.begin_read(array)

    @property
    @override
    def bonus(self) -> jax.Array:
        return self._bonus

    @override
    def ready(self) -> bool:
        return self._packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def read(self) -> Outcomes:
        packed = device.read(self._packed)
        log = self._logprobs
        reported = None if log is None else TopLogprobs(*(device.read(array) for array in log))
        tokens, node = (packed[:, 1:-1], packed[:, -1]) if self._tree else (packed[:, 1:], None)
        return Outcomes(packed[:, 0], tokens, reported, node, self._batch)


class DeviceLogprobs(PendingLogprobs):
    """Log-probabilities on their way from the device.

    Args:
      parts: how many tokens each array has that count, and the arrays [1, R].
    """

    def __init__(self, parts: list[tuple[int, Logprobs]]) -> None:
        self._parts = parts
        for array in jax.tree.leaves([log for _, log in parts]):
            device.begin_read(array)

    @override
    def read(self) -> TopLogprobs:
        read = [[device.read(array)[:, :count] for array in log] for count, log in self._parts]
        return TopLogprobs(*(np.concatenate(arrays, axis=1) for arrays in zip(*read, strict=True)))
