"""Grammars of a few tokens: which may follow which."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from ssd_jax.engine.grammar import Matcher
from ssd_jax.sampling.masks import BITS, words_of


def mask_of(tokens: Collection[int], vocab: int) -> np.ndarray:
    """The mask that allows these tokens."""
    bits = np.zeros(words_of(vocab) * BITS, bool)
    bits[[*tokens]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


class Successors:
    """A grammar in which the last token alone decides what may follow.

    Args:
      successors: of each token, and of None, the beginning; those that end a text included.
    """

    def __init__(self, successors: Mapping[int | None, Collection[int]], vocab: int) -> None:
        self.successors, self.vocab = successors, vocab
        self.started: list[SuccessorsMatcher] = []

    def start(self) -> Matcher:
        self.started.append(SuccessorsMatcher(self))
        return self.started[-1]


class SuccessorsMatcher:
    """Refuses what a `Matcher` is not asked for."""

    def __init__(self, grammar: Successors) -> None:
        self._grammar = grammar
        self.text: list[int] = []

    def _allowed(self) -> Collection[int]:
        return self._grammar.successors[self.text[-1] if self.text else None]

    def mask(self) -> np.ndarray:
        return mask_of(self._allowed(), self._grammar.vocab)

    def consume(self, token: int) -> None:
        assert token in self._allowed(), f"{token} may not follow {self.text}"
        self.text.append(token)

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.text)
        del self.text[-count:]
