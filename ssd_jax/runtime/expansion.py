"""What goes in and out of the programs that expand a draft's records into branches."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from ssd_jax.speculation.proposal import Array
from ssd_jax.speculation.record import Record


class Expansion(NamedTuple):
    """M branches of each of B records.

    Attributes:
      records: [B * M] what the branches speculate; their lengths count the tokens so far.
      path: [B * M, K + 1] int32, tokens after the record's pending one that lead to the branch,
        the bonus token last, padded with -1.
    """

    records: Record
    path: jax.Array


class Move(NamedTuple):
    """What becomes of B records when the outcomes of their verifications are known.

    Attributes:
      position: [B] int32, of the new pending token; -1 leaves a row idle.
      pending: [B] int32.
      committed: [B, K + 1] int32, output tokens since the last move, padded with -1.
      winner: [B] int32, the branch that becomes the record; -1 is a miss.
      tokens: [B, K] int32, after a miss: proposed tokens that the draft did not make.
      limit: [B] int32, most tokens of the record; after a miss, how many `tokens` there are.
    """

    position: Array
    pending: Array
    committed: Array
    winner: Array
    tokens: Array
    limit: Array


def no_moves(rows: int, k: int) -> Move:
    """Every row idle."""
    return Move(
        np.full(rows, -1, np.int32),
        np.zeros(rows, np.int32),
        np.full((rows, k + 1), -1, np.int32),
        np.full(rows, -1, np.int32),
        np.zeros((rows, k), np.int32),
        np.zeros(rows, np.int32),
    )
