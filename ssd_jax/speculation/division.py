"""Divides the branches of fan-outs over several drafts; each makes some for every sequence.

Branches of a sequence are numbered by k, then by rank. Each part takes consecutive ranks of every
k, and at least one branch of k = L, since its row runs the last proposed token, whose key and value
every draft needs. A part that gets none of F_L takes one more branch, which is never looked up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


def share(branches: int, parts: int) -> int:
    """Branches that each of P parts must have room for, so that M can be divided over the parts."""
    return -(-(branches + parts - 1) // parts)


class Division(NamedTuple):
    """How M branches a row are divided over P parts of m branches.

    Attributes:
      counts: F_0..F_L of each part.
      skip: number of ranks of the same k that come before the part's.
      places: of each part's branches among all M; -1 is a branch that is never looked up, or none.
    """

    counts: Int[np.ndarray, "P B F"]
    skip: Int[np.ndarray, "P B F"]
    places: Int[np.ndarray, "P B m"]


def divide(counts: Int[np.ndarray, "B F"], parts: int, size: int) -> Division:
    """Divides fan-outs F [B, K + 1] over parts as evenly as possible.

    Where m is less than a `share` of them, no part gets the last ranks of the k with most branches.

    Args:
      parts: P.
      size: m.
    """
    given, counts = counts, _fitting(counts, parts * size - (parts - 1))
    rows = len(counts)
    number = np.arange(parts)[:, None]  # [P, 1]
    live = counts.any(axis=1)
    last = _last(counts)
    every = np.arange(rows)
    of_last = counts[every, last]
    tails = np.maximum((of_last - number + parts - 1) // parts, live)  # [P, B]
    begins = of_last // parts * number + np.minimum(of_last % parts, number)

    before = counts.copy()
    before[every, last] = 0
    ends = before.cumsum(axis=1)  # [B, K + 1]
    total = ends[:, -1]
    most = -(-(total + tails.sum(axis=0)) // parts)
    taken = np.minimum((most - tails).cumsum(axis=0), total)  # [P, B], of k < L
    first = np.concatenate([np.zeros((1, rows), taken.dtype), taken[:-1]])
    starts = ends - before
    skip = np.clip(first[..., None] - starts, 0, before)
    found = np.clip(taken[..., None] - starts, 0, before) - skip
    found[:, every, last], skip[:, every, last] = tails, begins
    return Division(
        found.astype(np.int32), skip.astype(np.int32), _places(found, skip, counts, given, size)
    )


def _fitting(counts: Int[np.ndarray, "B F"], room: int) -> Int[np.ndarray, "B F"]:
    """As many of the branches as there is room for, at least one of k = L."""
    if (counts.sum(axis=1) <= room).all():
        return counts
    kept, most = counts.copy(), counts.max(axis=1, keepdims=True)
    while (over := (kept.sum(axis=1, keepdims=True) > room) & (most > 1)).any():
        most = most - over
        kept = np.minimum(counts, most)
    more = counts > kept
    kept = kept + (more & (more.cumsum(axis=1) <= room - kept.sum(axis=1, keepdims=True)))
    rows, last = np.arange(len(counts)), _last(counts)
    of_last = kept[rows, last].copy()
    kept[rows, last] = 0
    kept = np.clip(room - of_last[:, None] - (kept.cumsum(axis=1) - kept), 0, kept)
    kept[rows, last] = of_last
    return kept


def _last(counts: np.ndarray) -> np.ndarray:
    """L of each row, if it has any branch."""
    return counts.shape[1] - 1 - (counts[:, ::-1] > 0).argmax(axis=1)


def _places(
    found: np.ndarray, skip: np.ndarray, counts: np.ndarray, given: np.ndarray, size: int
) -> np.ndarray:
    ends = found.cumsum(axis=2)
    index = np.arange(size)
    k = (index[:, None] >= ends[:, :, None, :]).sum(axis=3)  # [P, B, m]; K + 1 is no branch
    used = k < counts.shape[1]
    k = np.minimum(k, counts.shape[1] - 1)

    def of_k(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.broadcast_to(values, found.shape), k, axis=2)

    rank = index - of_k(ends - found) + of_k(skip)
    return np.where(used & (rank < of_k(counts)), of_k(given.cumsum(axis=1) - given) + rank, -1)
