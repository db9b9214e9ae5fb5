"""Which outcome (k, rank) each of M branches is for. Works on NumPy and JAX arrays alike.

Fan-out says how many bonus tokens F_k are prepared for each number k of accepted tokens. Branches
are numbered by k, then by rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Forks(NamedTuple):
    """Where M branches of each of B sequences leave their records.

    Attributes:
      k: [B, M] integers, accepted tokens of the outcome; -1 is a branch that is not used.
      rank: [B, M] integers, place of its bonus token among those of the same k.
    """

    k: Any
    rank: Any


def forks(counts: Any, branches: int) -> Forks:
    """Numbers the branches of fan-outs F [B, K + 1] that sum to M = `branches` or less."""
    index, ends = np.arange(branches, dtype=np.int32), counts.cumsum(axis=1)
    ended = index[:, None] >= ends[:, None, :]  # [B, M, K + 1]
    used = index < ends[:, -1:]
    first = (ended * ends[:, None, :]).max(axis=-1)
    return Forks((ended.sum(axis=-1) + 1) * used - 1, (index - first) * used)
