"""Tracks the pages that a draft elsewhere has filled, so that it reuses no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ssd_jax.roles.records import ALL, SlotOpening


def own_pages(opening: SlotOpening, size: int) -> Sequence[int]:
    """Pages, of `size` positions, that a request does not reuse; none where slots share none."""
    return opening.pages[opening.reused // size :] if size else ()


class FilledPages:
    """Pages of which a draft was given all tokens since they were last assigned to a request.

    A draft that is late, or was restarted, has not filled all pages that the target has: it is then
    given a request's whole prompt, and writes into shared pages what belongs there anyway.

    Args:
      size: positions a page; 0 where slots share none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._filled: set[int] = set()

    def open(self, opening: SlotOpening) -> None:
        """Takes a request that begins: the pages that it does not reuse hold another text now."""
        self.lose(own_pages(opening, self._size))

    def lose(self, pages: Sequence[int]) -> None:
        """Drops pages that hold another text now."""
        self._filled.difference_update(pages)

    def known(self, opening: SlotOpening) -> SlotOpening:
        """The opening for this draft: it reuses only pages that the draft has filled.

        All output is given to the draft as committed tokens, not as part of a continued text.
        """
        count = 0
        while count * self._size < opening.reused and opening.pages[count] in self._filled:
            count += 1
        return dataclasses.replace(opening, reused=count * self._size, prompt=ALL)

    def taught(self, opening: SlotOpening, tokens: int) -> None:
        """Records that the draft was given the first `tokens` tokens of a request's text."""
        if self._size:
            self._filled.update(opening.pages[: tokens // self._size])

    def forget(self) -> None:
        """Starts over for another draft, whose pages are empty."""
        self._filled.clear()
