"""The arrays of a round, from the sequences in its rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from ssd_jax.engine.request_state import RequestState
from ssd_jax.roles.records import IDLE, DraftBatch


class RoundBatches:
    """Makes the batches of an engine.

    Args:
      slots: rows of a batch.
      k: most proposed tokens a round.
    """

    def __init__(self, slots: int, k: int) -> None:
        idle = [0, IDLE, IDLE, 0, 0, 0, *[-1] * (k + 1)]
        self._idle, self._k = np.tile(np.array(idle, np.int32)[:, None], slots), k

    def of(
        self, rows: Iterable[tuple[int, RequestState]]
    ) -> tuple[Int32[np.ndarray, "B"], Int32[np.ndarray, "B"], DraftBatch]:
        """Pending tokens and their positions for the target; the batch for the drafter."""
        columns = self._idle.copy()  # one array: several cost more than a loop
        for slot, state in rows:
            sequence, last = state.sequence, state.last
            room, at = sequence.room, sequence.cached
            limit = max(min(self._k, room - 1), 0)
            about = sequence.pending, at, at if limit else IDLE, len(last), limit, room
            columns[: len(about) + len(last), slot] = *about, *last
        pending, lengths, position, counts, limit, room = columns[:6]
        return pending, lengths, DraftBatch(pending, position, columns[6:].T, counts, limit, room)
