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
    requested, counts = counts, _trim(counts, parts * size - (parts - 1))
    rows = len(counts)
    part = np.arange(parts)[:, None]  # [P, 1]
    has_branches = counts.any(axis=1)
    last = _last(counts)
    row_index = np.arange(rows)
    last_counts = counts[row_index, last]
    tail_counts = np.maximum((last_counts - part + parts - 1) // parts, has_branches)  # [P, B]
    tail_starts = last_counts // parts * part + np.minimum(last_counts % parts, part)

    other_counts = counts.copy()
    other_counts[row_index, last] = 0
    ends = other_counts.cumsum(axis=1)  # [B, K + 1]
    total = ends[:, -1]
    size_limit = -(-(total + tail_counts.sum(axis=0)) // parts)
    ends_of_parts = np.minimum((size_limit - tail_counts).cumsum(axis=0), total)  # [P, B], of k < L
    starts_of_parts = np.concatenate([np.zeros((1, rows), ends_of_parts.dtype), ends_of_parts[:-1]])
    starts = ends - other_counts
    skip = np.clip(starts_of_parts[..., None] - starts, 0, other_counts)
    part_counts = np.clip(ends_of_parts[..., None] - starts, 0, other_counts) - skip
    part_counts[:, row_index, last], skip[:, row_index, last] = tail_counts, tail_starts
    places = _places(part_counts, skip, counts, requested, size)
    return Division(part_counts.astype(np.int32), skip.astype(np.int32), places)


def _trim(counts: Int[np.ndarray, "B F"], limit: int) -> Int[np.ndarray, "B F"]:
    """As many of the branches as there is room for, at least one of k = L."""
    if (counts.sum(axis=1) <= limit).all():
        return counts
    trimmed, size_limit = counts.copy(), counts.max(axis=1, keepdims=True)
    while (over := (trimmed.sum(axis=1, keepdims=True) > limit) & (size_limit > 1)).any():
        size_limit = size_limit - over
        trimmed = np.minimum(counts, size_limit)
    more = counts > trimmed
    trimmed = trimmed + (more & (more.cumsum(axis=1) <= limit - trimmed.sum(axis=1, keepdims=True)))
    rows, last = np.arange(len(counts)), _last(counts)
    last_counts = trimmed[rows, last].copy()
    trimmed[rows, last] = 0
    trimmed = np.clip(limit - last_counts[:, None] - (trimmed.cumsum(axis=1) - trimmed), 0, trimmed)
    trimmed[rows, last] = last_counts
    return trimmed


def _last(counts: np.ndarray) -> np.ndarray:
    """L of each row, if it has any branch."""
    return counts.shape[1] - 1 - (counts[:, ::-1] > 0).argmax(axis=1)


def _places(
    part_counts: np.ndarray, skip: np.ndarray, counts: np.ndarray, requested: np.ndarray, size: int
) -> np.ndarray:
    ends = part_counts.cumsum(axis=2)
    index = np.arange(size)
    k = (index[:, None] >= ends[:, :, None, :]).sum(axis=3)  # [P, B, m]; K + 1 is no branch
    is_branch = k < counts.shape[1]
    k = np.minimum(k, counts.shape[1] - 1)

    def at_k(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.broadcast_to(values, part_counts.shape), k, axis=2)

    rank = index - at_k(ends - part_counts) + at_k(skip)
    first = at_k(requested.cumsum(axis=1) - requested)
    return np.where(is_branch & (rank < at_k(counts)), first + rank, -1)
