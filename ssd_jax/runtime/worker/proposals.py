"""Proposals that the engine of a remote draft holds on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd_jax.kernels.row_sum import LONG
from ssd_jax.runtime.worker.messages import Winner
from ssd_jax.speculation.proposal import Proposal

_HALF_ULP = 2.0**-24  # the most that a float32 operation is off, as a share of its result


class HostProposals:
    """Proposed tokens of all slots; point masses until their q comes.

    Args:
      slots, k, support: B, K and N.
      ids: how many token ids exist.

    Attributes:
      tokens: [B, K] int32.
    """

    def __init__(self, slots: int, k: int, support: int, ids: int) -> None:
        self._ids = ids
        self.tokens = np.zeros((slots, k), np.int32)
        self._lengths = np.zeros(slots, np.int32)
        self._support = np.full((slots, k, support), -1, np.int32)
        self._q = np.zeros((slots, k, support), np.float32)

    def clear(self) -> None:
        """Nothing is proposed."""
        self.tokens[:] = 0
        self._lengths[:] = 0
        self._support[:] = -1
        self._q[:] = 0

    def put(self, slot: int, tokens: Sequence[int]) -> None:
        """Proposes tokens, each with probability 1."""
        count = self._lengths[slot] = len(tokens)
        self.tokens[slot, :count] = tokens
        self._support[slot, :count, 0] = tokens
        self._q[slot, :count, 0] = 1

    def put_q(self, slot: int, winner: Winner) -> bool:
        """Takes the q of a slot's tokens; returns False, and takes none, if it is malformed."""
        count = int(self._lengths[slot])
        rows = np.flatnonzero(winner.slots == slot)
        if slot not in winner.sampled or len(rows) != 1 or winner.lengths[rows[0]] < count:
            return False
        place = winner.sampled.index(slot)
        support, q = winner.support[place, :count], winner.q[place, :count]
        tokens = winner.tokens[rows[0], :count]
        if (tokens != self.tokens[slot, :count]).any() or not self._is_law(tokens, support, q):
            return False
        self._support[slot, :count], self._q[slot, :count] = support, q
        return True

    def now(self) -> Proposal:
        """What is known now, in arrays of its own."""
        return Proposal(
            self.tokens.copy(), self._lengths.copy(), self._support.copy(), self._q.copy()
        )

    def _is_law(self, tokens: np.ndarray, support: np.ndarray, q: np.ndarray) -> bool:
        """Whether each row of q [n, N] is a distribution over its support that gives its token."""
        used = support >= 0
        drawn = np.where(support == tokens[:, None], q, 0)
        ordered = np.sort(np.where(used, support, -1 - np.arange(support.shape[1])), axis=1)
        # Weights were divided by their float32 sum: n - 1 additions and a division, and two more
        # where that is a product with a reciprocal. Longer rows are summed in parts.
        off = (np.minimum((q > 0).sum(axis=1), LONG) + 2) * _HALF_ULP
        return bool(
            np.isfinite(q).all()
            and (q >= 0).all()
            and (q[~used] == 0).all()
            and (support < self._ids).all()
            and (abs(q.sum(axis=1, dtype=np.float64) - 1) <= off).all()
            and (drawn.sum(axis=1) > 0).all()
            and (np.diff(ordered, axis=1) > 0).all()
        )
