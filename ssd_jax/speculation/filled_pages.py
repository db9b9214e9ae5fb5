"""Which pages a draft elsewhere has filled, so that it reuses no others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ssd_jax.roles.records import ALL, SlotOpening


def own_pages(opening: SlotOpening, size: int) -> Sequence[int]:
    """Pages of so many positions that a request does not reuse; none where slots share none."""
    return opening.pages[opening.reused // size :] if size else ()


class FilledPages:
    """Pages of which a draft was given all tokens, since they were last given to a request.

    A draft that is late, or was started again, has not filled what the target has: a request then
    gives it the whole prompt, and it writes into pages that others share what belongs there.

    Args:
      size: positions of a page; 0 where slots share none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._filled: set[int] = set()

    def open(self, opening: SlotOpening) -> None:
        """A request has begun: the pages that it does not reuse are another text's from here on."""
        self.lose(own_pages(opening, self._size))

    def lose(self, pages: Sequence[int]) -> None:
        """These pages are another text's from here on."""
        self._filled.difference_update(pages)

    def known(self, opening: SlotOpening) -> SlotOpening:
        """The request as this draft is to be told of it: it reuses what it has filled, and is told
        of all output as of what was committed, not as of a text that goes on."""
        count = 0
        while count * self._size < opening.reused and opening.pages[count] in self._filled:
            count += 1
        return dataclasses.replace(opening, reused=count * self._size, prompt=ALL)

    def taught(self, opening: SlotOpening, tokens: int) -> None:
        """The draft was given this many tokens of a request's text."""
        if self._size:
            self._filled.update(opening.pages[: tokens // self._size])

    def forget(self) -> None:
        """The draft is another one, whose pages are empty."""
        self._filled.clear()
