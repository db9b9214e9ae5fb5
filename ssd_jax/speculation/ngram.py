"""Prompt lookup: proposes the tokens that followed the text's suffix when it last occurred.

Pure host code. The longest suffix of prompt and output that occurred before is looked up, and
the tokens that followed it are proposed. Source: prompt lookup decoding (Saxena, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LONGEST = 32  # tokens; longer matches are not told apart


class NgramIndex:
    """The tokens of one sequence, with look-up of their suffixes."""

    def __init__(self) -> None:
        self._tokens = np.zeros(256, np.int32)
        self._size = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return self._size

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens."""
        size = self._size + len(tokens)
        if size > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * size)
        self._tokens[self._size : size] = tokens
        self._size = size

    def propose(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest earlier match, the latest of them."""
        tokens = self._tokens[: self._size]
        if not self._size:
            return []
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        length = 1
        while len(ends) and length < min(_LONGEST, self._size):
            # An index below 0 would wrap around: such a match begins at the text's beginning.
            longer = ends[(ends >= length) & (tokens[ends - length] == tokens[-1 - length])]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends):
            return []
        # A match that reaches the end of the text continues as it began: the text repeats itself.
        after, period = int(ends[-1]) + 1, self._size - 1 - int(ends[-1])
        return [int(tokens[after + step % period]) for step in range(count)]
