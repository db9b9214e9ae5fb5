"""What a draft elsewhere has of the texts of its slots, and what it must still be given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ssd_jax.roles.records import ALL, IDLE, Promotion, SlotOpening, pad_rows


def own_pages(opening: SlotOpening, size: int) -> Sequence[int]:
    """Pages, of `size` positions, that a request does not reuse; none where slots share none."""
    return opening.pages[opening.reused // size :] if size else ()


@dataclasses.dataclass(kw_only=True)
class DraftText:
    """A slot's text, and how much of it the draft has.

    Attributes:
      opening: of the slot, with all pages that it has got since.
      tokens: prompt and committed tokens; the first `prompt` are the prompt's.
      cached: positions whose keys and values the draft has for certain.
      counted: tokens that the draft has as prompt or has counted as output.
      expanded: whether the last round expanded its record: the draft has all its keys and values.
    """

    opening: SlotOpening
    tokens: list[int] = dataclasses.field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    counted: int = 0
    expanded: bool = False

    def prefill(self, tokens: Sequence[int], offset: int) -> None:
        """Takes tokens of the text so far; see `SlotOpening.prompt`."""
        self.tokens[offset:] = tokens
        self.prompt = min(len(self.tokens), self.opening.prompt)

    def recorded(self, position: int) -> list[int]:
        """Notes that the draft gets a record at `position`; returns the tokens it must count."""
        uncounted = self.tokens[self.counted :]
        self.counted, self.cached = len(self.tokens), position
        self.expanded = False
        return uncounted


class DraftTexts:
    """The texts of a draft's slots, and the pages that it has filled.

    A draft that is late, or was restarted, lacks tokens and has not filled all pages that the
    target has: it is given the tokens it lacks, and reuses only pages of which it was given all
    tokens since they were last assigned to a request. What it then writes into shared pages is what
    belongs there anyway.

    Args:
      page_size: positions of a page; 0 where slots share none.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._texts: dict[int, DraftText] = {}
        self._filled: set[int] = set()

    def __getitem__(self, slot: int) -> DraftText:
        return self._texts[slot]

    def open(self, opening: SlotOpening) -> None:
        """A request begins: the pages that it does not reuse hold another text now."""
        self._texts[opening.slot] = DraftText(opening=opening)
        self.lose(own_pages(opening, self._page_size))

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """A slot has all these pages now."""
        text = self._texts[slot]
        self.lose(pages[len(text.opening.pages) :])
        text.opening = dataclasses.replace(text.opening, pages=pages)

    def lose(self, pages: Sequence[int]) -> None:
        """These pages hold another text now."""
        self._filled.difference_update(pages)

    def reusable(self, slot: int) -> SlotOpening:
        """The slot's opening for this draft: it reuses only pages that the draft has filled.

        All output is given to the draft as committed tokens, not as part of a continued text.
        """
        opening, count = self._texts[slot].opening, 0
        while count * self._page_size < opening.reused and opening.pages[count] in self._filled:
            count += 1
        return dataclasses.replace(opening, reused=count * self._page_size, prompt=ALL)

    def teach(self, slot: int, prefill: Callable[[list[int], int], None]) -> None:
        """Gives the draft the tokens of a text that it lacks, by `prefill(tokens, offset)`."""
        text = self._texts[slot]
        if text.cached < len(text.tokens):
            prefill(text.tokens[text.cached :], text.cached)
            text.cached = len(text.tokens)
        text.counted = max(text.counted, text.prompt)
        if self._page_size:
            self._filled.update(text.opening.pages[: len(text.tokens) // self._page_size])

    def forget(self, slot: int) -> None:
        """Another draft has this slot, and knows nothing of its text."""
        text = self._texts[slot]
        text.cached = text.counted = 0

    def forget_pages(self) -> None:
        """The pages are another draft's, and empty."""
        self._filled.clear()

    def record(self, promotion: Promotion, teach: Callable[[int], None] | None) -> Promotion:
        """Adds a round's committed tokens to the texts.

        Args:
          teach: gives the draft what it lacks of a slot's text; None if it gets no records.

        Returns: the promotion for the draft: all tokens that it has not counted yet are committed,
          and nothing is moved that it was just given.
        """
        slots = np.flatnonzero(promotion.position != IDLE).tolist()
        for slot, text in self._texts.items():
            text.expanded = text.expanded and teach is not None and slot in slots
        uncounted: dict[int, list[int]] = {}
        node = None if promotion.node is None else promotion.node.copy()
        for slot in slots:
            text, position = self._texts[slot], int(promotion.position[slot])
            committed = promotion.committed[slot]
            committed = committed[committed >= 0].tolist()
            # Tokens of a request that failed come again.
            text.tokens[position + 1 - len(committed) :] = committed
            if teach is not None:
                if not text.expanded:
                    teach(slot)
                    if node is not None:
                        node[slot] = 0
                uncounted[slot] = text.recorded(position)
        width = promotion.committed.shape[1]
        committed = pad_rows(uncounted, len(promotion.position), width)
        return promotion._replace(committed=committed, node=node)

    def expand(self, slots: Sequence[int]) -> None:
        """The draft expands the records of these slots, which runs all of their tokens."""
        for slot in slots:
            self._texts[slot].expanded = True
