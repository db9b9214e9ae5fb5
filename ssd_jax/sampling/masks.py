"""Masks of a grammar: which tokens may follow, a bit each, made by the host for every position."""

from __future__ import annotations

BITS = 32
"""Tokens of a word of a mask: bit b of word w is token 32 w + b."""

ANY_TOKEN = -1
"""A word that allows every token of its bits."""


def words_of(vocab: int) -> int:
    """Words of a mask."""
    return -(-vocab // BITS)
