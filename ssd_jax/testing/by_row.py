"""The arrays that the roles exchange, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ssd_jax.roles.records import IDLE, DraftBatch, Promotion, draft_batch, no_promotion, pad_rows


class DraftRow(NamedTuple):
    """A row of a `DraftBatch`; its last committed token is the pending one."""

    slot: int
    position: int
    committed: Sequence[int]
    limit: int
    room: int = 2**30


class Promoted(NamedTuple):
    """A row of a `Promotion`."""

    slot: int
    position: int
    pending: int
    committed: Sequence[int] = ()
    winner: int = -1
    tokens: Sequence[int] = ()
    limit: int = 0


def batch_of(rows: Sequence[DraftRow], slots: int = 2) -> DraftBatch:
    """The batch of these rows; the other slots are idle."""
    batch = draft_batch(slots, max(len(row.committed) for row in rows))
    for row in rows:
        slot = row.slot
        batch.pending[slot] = row.committed[-1]
        batch.position[slot], batch.counts[slot] = row.position, len(row.committed)
        batch.tokens[slot, : len(row.committed)] = row.committed
        batch.limit[slot], batch.room[slot] = row.limit, row.room
    return batch


def rows_of(batch: DraftBatch) -> list[DraftRow]:
    """The rows that are not idle."""
    return [
        DraftRow(
            slot,
            int(batch.position[slot]),
            batch.tokens[slot, : batch.counts[slot]].tolist(),
            int(batch.limit[slot]),
            int(batch.room[slot]),
        )
        for slot in batch.slots
    ]


def promotion_of(rows: Sequence[Promoted], slots: int, k: int) -> Promotion:
    """The promotion of these rows; the other slots are idle."""
    promotion = no_promotion(slots, k)
    for row in rows:
        slot = row.slot
        promotion.position[slot], promotion.pending[slot] = row.position, row.pending
        promotion.winner[slot] = row.winner
        promotion.tokens[slot, : len(row.tokens)] = row.tokens
        promotion.limit[slot] = row.limit if row.winner >= 0 else len(row.tokens)
    committed = pad_rows({row.slot: row.committed for row in rows}, slots, k + 1)
    return promotion._replace(committed=committed)


def promoted(promotion: Promotion) -> list[Promoted]:
    """The rows that are not idle."""
    rows = []
    for slot in np.flatnonzero(promotion.position != IDLE).tolist():
        winner, limit = int(promotion.winner[slot]), int(promotion.limit[slot])
        committed = [token for token in promotion.committed[slot].tolist() if token >= 0]
        rows.append(
            Promoted(
                slot,
                int(promotion.position[slot]),
                int(promotion.pending[slot]),
                committed,
                winner,
                [] if winner >= 0 else promotion.tokens[slot, :limit].tolist(),
                limit if winner >= 0 else 0,
            )
        )
    return rows
