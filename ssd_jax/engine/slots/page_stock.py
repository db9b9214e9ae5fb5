"""The stock of KV-cache pages that slots share: each slot's pages, and common prompt prefixes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Digest = bytes


class PageGrant(NamedTuple):
    """Pages that a request gets.

    Attributes:
      pages: in the order of their positions.
      reused: number of positions, in the first pages, that already have the right keys and values.
    """

    pages: tuple[int, ...]
    reused: int


@dataclasses.dataclass
class _SlotPages:
    """Pages of a slot; the first `filled` of them hold the tokens that `names` stand for, and the
    first `released` are no longer its own, since no query sees them any more."""

    pages: tuple[int, ...]
    names: Sequence[Digest]
    filled: int
    released: int = 0


class _Group:
    """The pages that a group of slots has in common.

    A page is in use by one or more requests; or `cached`: unused, but still known by its content,
    in the order in which pages are forgotten; or `free`.
    """

    def __init__(self, pages: range) -> None:
        self.free = deque(pages)
        self.cached: dict[int, None] = {}
        self.users: Counter[int] = Counter()
        self.by_name: dict[Digest, int] = {}
        self.names: dict[int, Digest] = {}

    def take(self, count: int) -> list[int]:
        """Pages for new keys and values of a request: free ones first, then kept ones."""
        pages = []
        for _ in range(count):
            if self.free:
                page = self.free.popleft()
            else:
                page = next(iter(self.cached))
                del self.cached[page], self.by_name[self.names.pop(page)]
            self.use(page)
            pages.append(page)
        return pages

    def use(self, page: int) -> None:
        """Counts one more request that uses a page."""
        self.cached.pop(page, None)
        self.users[page] += 1

    def leave(self, page: int) -> None:
        """Counts one request less that uses a page."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if page in self.names:
            self.cached[page] = None
        else:
            self.free.append(page)


class PageStock:
    """Free and taken pages, with the same numbers for target and draft.

    A request gets the pages that its text needs, and more as the text grows; or, when it enters a
    slot, all pages that it may ever need.

    Full pages of prompts are known by the tokens up to their end. Requests whose prompts have a
    common prefix share its pages, which are never written again; the last token of a prompt is
    never in a shared page, because it must run for its logits.

    Where every layer has a window, a text's pages before it are given back as the text grows.

    Args:
      slots: number of slots of the engine.
      count: pages of all slots together; equal groups of slots have equal shares.
      size: positions a page.
      beyond: positions that rounds may write behind the last token of a request.
      context: most positions of a request.
      groups: number of groups of slots whose devices have pages of their own.
      grain: positions that are reused together, in whole pages; 0 reuses none.
      grows: whether pages are given as texts grow.
      window: most positions that a query sees, its own included; None sees all.
    """

    def __init__(
        self,
        *,
        slots: int,
        count: int,
        size: int,
        beyond: int,
        context: int,
        groups: int = 1,
        grain: int = 0,
        grows: bool = False,
        window: int | None = None,
    ) -> None:
        self.grows, self._window = grows, window
        self._size, self._beyond, self._context = size, beyond, context
        self._group_pages = count // groups
        self._group_slots = slots // groups
        group_pages = self._group_pages
        self._groups = [
            _Group(range(index * group_pages, (index + 1) * group_pages)) for index in range(groups)
        ]
        self._grain = grain // size  # pages
        self._by_slot: dict[int, _SlotPages] = {}

    @property
    def count(self) -> int:
        """Number of pages."""
        return self._group_pages * len(self._groups)

    @property
    def used(self) -> int:
        """Number of pages that requests hold."""
        return self.count - sum(len(group.free) + len(group.cached) for group in self._groups)

    @property
    def shares(self) -> bool:
        """Whether requests whose prompts have a common prefix share its pages."""
        return self._grain > 0

    def needed(self, tokens: int) -> int:
        """Number of pages for a text of `tokens` tokens and what rounds write behind it."""
        limit = -(-self._context // self._size)
        return min(-(-(min(tokens, self._context) + self._beyond) // self._size), limit)

    def names(self, prompt: Sequence[int], kind: bytes = b"") -> tuple[Digest, ...]:
        """Names of the pages of a prompt that may be shared, among requests of a kind: a digest of
        all tokens up to the end of each page."""
        if not self._grain:
            return ()
        count = (len(prompt) - 1) // (self._grain * self._size) * self._grain
        ids = np.asarray(prompt[: count * self._size], "<i8").reshape(count, self._size)
        names, name = [], kind
        for page in ids:
            name = hashlib.blake2b(name + page.tobytes(), digest_size=32).digest()
            names.append(name)
        return tuple(names)

    def take(
        self,
        slot: int,
        tokens: int,
        names: Sequence[Digest] = (),
        spare: int = 0,
        *,
        reuses: bool = True,
    ) -> PageGrant | None:
        """Takes the pages of a request for a free slot; None if there are not enough.

        Args:
          tokens: length of the text that they are for.
          names: of the prompt's pages.
          spare: pages to leave for other requests.
          reuses: whether known pages of the prompt are taken.
        """
        group, needed = self._group(slot), self.needed(tokens)
        shared = self._shared_prefix(group, names) if reuses else []
        cached = len(group.cached) - sum(page in group.cached for page in shared)
        if needed - len(shared) > len(group.free) + cached - spare:
            return None
        for page in shared:  # before others are forgotten
            group.use(page)
        pages = *shared, *group.take(needed - len(shared))
        self._by_slot[slot] = _SlotPages(pages, names, len(shared))
        return PageGrant(pages, len(shared) * self._size)

    def grow(self, slot: int, tokens: int) -> bool:
        """Gives a slot the further pages that a text of `tokens` tokens needs.

        Returns False, and gives none, if there are not enough.
        """
        slot_pages, group = self._by_slot[slot], self._group(slot)
        count = self.needed(tokens) - len(slot_pages.pages)
        if count > len(group.free) + len(group.cached):
            return False
        slot_pages.pages = *slot_pages.pages, *group.take(count)
        return True

    def pages(self, slot: int) -> tuple[int, ...]:
        """All pages of a slot."""
        return self._by_slot[slot].pages

    def same_group(self, slot: int, other: int) -> bool:
        """Whether two slots take their pages from the same group."""
        return self._group(slot) is self._group(other)

    def best(self, slots: Sequence[int], names: Sequence[Digest]) -> list[int]:
        """A free slot of each group, that of the group that holds most of the prompt first."""
        ones = {slot // self._group_slots: slot for slot in reversed(slots)}.values()
        return sorted(
            ones, key=lambda slot: (-len(self._shared_prefix(self._group(slot), names)), slot)
        )

    def fill(self, slot: int, positions: int) -> None:
        """Lets others reuse the first positions of a slot, which both roles were asked to fill."""
        slot_pages = self._by_slot[slot]
        group, end = self._group(slot), min(positions // self._size, len(slot_pages.names))
        for index in range(slot_pages.filled, end):
            page, name = slot_pages.pages[index], slot_pages.names[index]
            if name not in group.by_name:
                group.by_name[name], group.names[page] = page, name
        slot_pages.filled = max(slot_pages.filled, end)

    def release_hidden(self, slot: int, position: int) -> None:
        """Takes back the pages of a slot that no query from `position` on sees.

        A slot's page numbers stay as they are, since places in a page table are positions. Pages of
        a prompt that others may reuse stay until they are filled.
        """
        if self._window is None:
            return
        slot_pages, group = self._by_slot[slot], self._group(slot)
        end = min(max(position - self._window + 1, 0) // self._size, len(slot_pages.pages))
        if slot_pages.filled < len(slot_pages.names):
            end = min(end, slot_pages.filled)
        for page in slot_pages.pages[slot_pages.released : end]:
            group.leave(page)
        slot_pages.released = max(slot_pages.released, end)

    def give_back(self, slot: int) -> None:
        """Takes back the pages of a slot, if it has any.

        Of the pages that are kept, the end of a text is forgotten before its beginning.
        """
        slot_pages = self._by_slot.pop(slot, None)
        if slot_pages is not None:
            for page in reversed(slot_pages.pages[slot_pages.released :]):
                self._group(slot).leave(page)

    def _group(self, slot: int) -> _Group:
        return self._groups[slot // self._group_slots]

    def _shared_prefix(self, group: _Group, names: Sequence[Digest]) -> list[int]:
        """Pages that hold the beginning of a prompt, in whole grains."""
        pages: list[int] = []
        for name in names:
            if name not in group.by_name:
                break
            pages.append(group.by_name[name])
        return pages[: len(pages) // self._grain * self._grain] if pages else pages
