"""Training prompts that would give held-out ones away.

A training text leaks if it shares `SPAN` consecutive tokens with a held-out text, or contains the
whole of a held-out text of at most so many. That is judged on what the sets' authors wrote: a chat
template and a system message are the same in every prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

SPAN = 13
"""Tokens."""


class HeldOut:
    """The spans of held-out texts.

    Args:
      texts: of each text its spellings in tokens, the usual one first. A text's first token may
        differ with what is before it, which matters only if the text is all that is compared.
      span: tokens that must not be shared.
    """

    def __init__(self, texts: Iterable[Sequence[Sequence[int]]], span: int = SPAN) -> None:
        self._spans: dict[int, set[bytes]] = {}
        for spellings in texts:
            if len(spellings[0]) > span:
                self._add(_spans(spellings[0], span), span)
                continue
            for tokens in spellings:
                if len(tokens):
                    self._add(_spans(tokens, len(tokens)), len(tokens))

    def leaks(self, tokens: Sequence[int]) -> bool:
        """Whether a training text of these tokens must not be used."""
        return any(
            not spans.isdisjoint(_spans(tokens, length)) for length, spans in self._spans.items()
        )

    def _add(self, spans: Iterable[bytes], length: int) -> None:
        self._spans.setdefault(length, set()).update(spans)


def _spans(tokens: Sequence[int], length: int) -> Iterable[bytes]:
    data, size = np.asarray(tokens, np.int32).tobytes(), 4 * length
    return (data[begin : begin + size] for begin in range(0, len(data) - size + 1, 4))
