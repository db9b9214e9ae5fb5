"""Whole texts in the rows of forwards, which are all of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

_TOKENS = 4096
"""Of a forward."""

_STEP = 128
"""Rows are a multiple of so many tokens long."""


def room(longest: int) -> tuple[int, int]:
    """Rows of a forward, and tokens of a row, for texts of at most so many tokens."""
    length = -(-longest // _STEP) * _STEP
    return max(1, _TOKENS // length), length


def batches(sizes: Sequence[int], rows: int, length: int) -> Iterator[Batch]:
    """Texts of these sizes in rows, each in the first of a batch's rows that has room."""
    batch = Batch(rows, length)
    for index, size in enumerate(sizes):
        if not batch.put(index, size):
            yield batch
            batch = Batch(rows, length)
            batch.put(index, size)
    if batch.texts:
        yield batch


class Batch:
    """Rows of texts.

    Attributes:
      texts: (index of the text, its first token's place in the flattened batch).
    """

    def __init__(self, rows: int, length: int) -> None:
        self.texts: list[tuple[int, int]] = []
        self._free = [length] * rows
        self._length = length

    def put(self, index: int, size: int) -> bool:
        """Takes a text, if there is room."""
        for row, free in enumerate(self._free):
            if size <= free:
                self.texts.append((index, (row + 1) * self._length - free))
                self._free[row] -= size
                return True
        return False

    def arrays(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and segments, each [rows, length] int32; segment 0 is padding."""
        tokens, positions, segments = np.zeros((3, len(self._free) * self._length), np.int32)
        for segment, (index, place) in enumerate(self.texts, start=1):
            own = slice(place, place + len(texts[index]))
            tokens[own] = texts[index]
            positions[own] = np.arange(len(texts[index]))
            segments[own] = segment
        shape = (len(self._free), self._length)
        return tokens.reshape(shape), positions.reshape(shape), segments.reshape(shape)
