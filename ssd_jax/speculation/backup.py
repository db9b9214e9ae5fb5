"""Backups: what a sequence proposes after a miss, without waiting for the draft.

The verification treats their tokens as point masses, wherever they come from. The backup `draft`,
a just-in-time draft, is the draft's own work and is not made here. Pure host code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from typing_extensions import override

from ssd_jax.speculation.ngram import NgramIndex

BackupKind = Literal["auto", "none", "ngram", "random", "draft"]
KINDS: tuple[BackupKind, ...] = get_args(BackupKind)
"""Backups that a user may ask for."""


class Backup:
    """The backup of one sequence; a new request gets a new one.

    This base class proposes nothing: the round then draws one token.
    """

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens of the prompt, then committed ones."""

    def propose(self, start: int, count: int) -> list[int]:
        """Up to `count` tokens after the pending token, which is at position `start`.

        They never depend on the noise that they are verified with.
        """
        return []


class NgramBackup(Backup):
    """Proposes what followed the same n-gram earlier in the text."""

    def __init__(self) -> None:
        self._text = NgramIndex()

    @override
    def extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)

    @override
    def propose(self, start: int, count: int) -> list[int]:
        return self._text.propose(count)


class RandomBackup(Backup):
    """Proposes uniform random ids, a function of seed, request and start alone.

    They come from a cipher that no other draw uses (Philox-4x64), so they are independent of all
    noise of draft and target.

    Args:
      seed: the user's, 64 bits.
      request: sample index that the caller gives; never a slot.
      tokens: number of ids of the tokenizer.
    """

    def __init__(self, seed: int, request: int, tokens: int) -> None:
        self._key = np.array([seed, request], np.uint64)
        self._tokens = tokens

    @override
    def propose(self, start: int, count: int) -> list[int]:
        """A smaller `count` gives the first tokens of a larger one."""
        # The first counter word counts the draws, so draws of different starts never overlap. Raw
        # words, because NumPy may change how its generators turn them into integers.
        words = np.random.Philox(key=self._key, counter=[0, start, 0, 0]).random_raw(count)
        return [int(word) * self._tokens >> 64 for word in words]


def make(kind: BackupKind, seed: int, request: int, tokens: int) -> Backup:
    """The backup of a new request; arguments as for `RandomBackup`."""
    match kind:
        case "random":
            return RandomBackup(seed, request, tokens)
        case "ngram":
            return NgramBackup()
        case "auto" | "none" | "draft":
            return Backup()
