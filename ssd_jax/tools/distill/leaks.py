"""Which training texts leak a held-out one.

A text leaks one if it shares `SPAN` consecutive tokens with it, or contains the whole of one of at
most `SPAN` tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

SPAN = 13
"""Tokens."""


class HeldOut:
    """Recognises held-out texts: long ones by their spans, short ones as text.

    The first and last tokens of a short one may differ with the text around it.

    Args:
      texts: in tokens.
      decode: gives the text of tokens.
    """

    def __init__(
        self, texts: Iterable[Sequence[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._decode = decode
        self._spans: set[bytes] = set()
        self._short: set[str] = set()
        for tokens in texts:
            if len(tokens) > SPAN:
                self._spans.update(_spans(tokens))
            elif text := decode(tokens).strip():
                self._short.add(text)

    def leaks(self, tokens: Sequence[int]) -> bool:
        """Whether a training text of these tokens must not be used."""
        if not self._spans.isdisjoint(_spans(tokens)):
            return True
        text = self._decode(tokens) if self._short else ""
        return any(short in text and _has_words(text, short) for short in self._short)


def _spans(tokens: Sequence[int]) -> Iterator[bytes]:
    data, size = np.asarray(tokens, np.int32).tobytes(), 4 * SPAN
    return (data[begin : begin + size] for begin in range(0, len(data) - size + 1, 4))


def _has_words(text: str, phrase: str) -> bool:
    """Whether `phrase` occurs in a text with no ASCII word cut at its ends."""
    return re.search(rf"(?!\B\w){re.escape(phrase)}(?<!\w\B)", text, re.ASCII) is not None
