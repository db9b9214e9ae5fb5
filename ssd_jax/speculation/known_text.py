"""Tracks how far a draft elsewhere knows the texts of its slots, and what it must be sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ssd_jax.roles.records import ALL, IDLE, Promotion, padded


@dataclasses.dataclass(kw_only=True)
class KnownText:
    """A slot's text, and how much of it the draft has.

    Attributes:
      most: tokens of the prompt; tokens given behind them are output.
      tokens: prompt and committed tokens; the first `prompt` are the prompt's.
      known: positions whose keys and values the draft has for certain.
      counted: tokens that the draft has as prompt or has counted as output.
      whole: whether the last round expanded its record: the draft has all its keys and values.
    """

    most: int = ALL
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt: int = 0
    known: int = 0
    counted: int = 0
    whole: bool = False

    def prefill(self, tokens: Sequence[int], offset: int) -> None:
        """Takes tokens of the text so far; see `SlotOpening.prompt`."""
        self.tokens[offset:] = tokens
        self.prompt = min(len(self.tokens), self.most)

    def forget(self) -> None:
        """Starts over for another draft, which knows nothing yet."""
        self.known = self.counted = 0

    def teach(self, prefill: Callable[[list[int], int], None]) -> None:
        """Gives the draft the tokens that it lacks, by `prefill(tokens, offset)`."""
        if self.known < len(self.tokens):
            prefill(self.tokens[self.known :], self.known)
            self.known = len(self.tokens)
        self.counted = max(self.counted, self.prompt)

    def promoted(self, position: int) -> list[int]:
        """Records that the draft gets a record at `position`; returns the tokens it must count."""
        uncounted = self.tokens[self.counted :]
        self.counted, self.known = len(self.tokens), position
        self.whole = False  # until this record is expanded
        return uncounted


def promoted(
    texts: Mapping[int, KnownText], promotion: Promotion, teach: Callable[[int], None] | None
) -> Promotion:
    """Adds a round's committed tokens to the texts by slot.

    Args:
      teach: gives the draft what it lacks of a slot's text; None if it is not told of this round.

    Returns: the promotion for the draft: all tokens that it has not counted yet are committed.
    """
    rows = np.flatnonzero(promotion.position != IDLE).tolist()
    for slot, text in texts.items():
        text.whole = text.whole and teach is not None and slot in rows
    uncounted: dict[int, list[int]] = {}
    for slot in rows:
        text, position = texts[slot], int(promotion.position[slot])
        committed = promotion.committed[slot]
        committed = committed[committed >= 0].tolist()
        # Tokens told by an interrupted step come again.
        text.tokens[position + 1 - len(committed) :] = committed
        if teach is not None:
            if not text.whole:
                teach(slot)
            uncounted[slot] = text.promoted(position)
    width = promotion.committed.shape[1]
    return promotion._replace(committed=padded(uncounted, len(promotion.position), width))
