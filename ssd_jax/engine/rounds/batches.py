"""The arrays of a round, from the sequences in its rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from ssd_jax.engine.requests.state import RequestState
from ssd_jax.roles.records import IDLE, DraftBatch, Row


class _Fields(NamedTuple):
    """A number of each slot, in one array: copying several would cost more than the loop.

    Attributes:
      pending, position, counts, limit, room, node, branches: see `DraftBatch`.
      lengths: position of the pending token, also in rows that get no proposal.
    """

    pending: Row
    lengths: Row
    position: Row
    counts: Row
    limit: Row
    room: Row
    node: Row
    branches: Row


_IDLE = dict.fromkeys(_Fields._fields, 0) | {"lengths": IDLE, "position": IDLE}
_COUNT = len(_Fields._fields)


class RoundBatches:
    """Makes the batches of an engine.

    Args:
      slots: rows of a batch.
      k: most proposed tokens a round.
    """

    def __init__(self, slots: int, k: int) -> None:
        self._idle = np.full((_COUNT + k + 1, slots), -1, np.int32)
        for field, row in zip(_Fields._fields, self._idle[:_COUNT], strict=True):
            row[:] = _IDLE[field]

    def make(
        self, rows: Iterable[tuple[int, RequestState]]
    ) -> tuple[Int32[np.ndarray, "B"], Int32[np.ndarray, "B"], DraftBatch]:
        """Pending tokens and their positions for the target; the batch for the drafter."""
        array = self._idle.copy()
        fields, tokens = _Fields(*array[:_COUNT]), array[_COUNT:]
        pending, lengths, position, counts, limit, room, node, branches = fields
        for slot, state in rows:
            sequence, committed = state.sequence, state.last
            proposed = state.limit
            pending[slot], lengths[slot] = sequence.pending, sequence.cached
            position[slot] = sequence.cached if proposed else IDLE
            limit[slot], room[slot] = proposed, sequence.room
            counts[slot], node[slot] = len(committed), state.node
            branches[slot] = state.branches
            tokens[: len(committed), slot] = committed
        batch = DraftBatch(pending, position, tokens.T, counts, limit, room, node, branches)
        return pending, lengths, batch
