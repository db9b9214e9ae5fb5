"""Pages of keys and values that slots take from a common stock: which request has which, and whose
prompts begin alike."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ssd_jax.errors import InputError

Digest = bytes


class Taken(NamedTuple):
    """What a request gets.

    Attributes:
      pages: in the order of their positions.
      reused: positions of the first ones that have the right keys and values already.
    """

    pages: tuple[int, ...]
    reused: int


@dataclasses.dataclass
class _Held:
    """What a slot has; the first `filled` pages named by `names` have what these say."""

    pages: tuple[int, ...]
    names: Sequence[Digest]
    filled: int


class _Group:
    """Pages of slots that have them in common.

    A page is in use by one request or more, or `kept`: in use by none, but still known by what is
    in it, in the order in which it is forgotten; or `free`.
    """

    def __init__(self, pages: range) -> None:
        self.free = deque(pages)
        self.kept: dict[int, None] = {}
        self.users: Counter[int] = Counter()
        self.by_name: dict[Digest, int] = {}
        self.names: dict[int, Digest] = {}

    def take(self, count: int) -> list[int]:
        """Pages for other keys and values of a request: such of which nothing is known, if there
        are any."""
        pages = []
        for _ in range(count):
            if self.free:
                page = self.free.popleft()
            else:
                page = next(iter(self.kept))
                del self.kept[page], self.by_name[self.names.pop(page)]
            self.use(page)
            pages.append(page)
        return pages

    def use(self, page: int) -> None:
        """Counts another request that has a page."""
        self.kept.pop(page, None)
        self.users[page] += 1

    def leave(self, page: int) -> None:
        """One of them is gone."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if page in self.names:
            self.kept[page] = None
        else:
            self.free.append(page)


class PageStock:
    """Free and taken pages, the same ones for target and draft. A request gets what its text needs,
    and more as that grows; or, when it enters a slot, all that it may come to need.

    Full pages of prompts are known by the tokens up to their end. Requests whose prompts begin
    alike have these pages in common, which nobody writes; the last token of a prompt is never in
    one, as it must run for its logits.

    Args:
      slots: of the engine.
      count: pages of all slots together; equal groups of slots have equal parts of them.
      size: positions of a page.
      beyond: positions that rounds may write behind the last token of a request.
      context: most positions of a request.
      groups: of slots whose devices have pages of their own.
      grain: positions that are reused together, whole pages; 0 reuses none.
      grows: whether pages are given as texts grow.
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
    ) -> None:
        self.grows = grows
        self._size, self._beyond, self._context = size, beyond, context
        self._each = count // groups
        self._share = slots // groups
        each = self._each
        self._groups = [_Group(range(index * each, (index + 1) * each)) for index in range(groups)]
        self._grain = grain // size  # pages
        self._held: dict[int, _Held] = {}

    @property
    def shares(self) -> bool:
        """Whether requests whose prompts begin alike have pages in common."""
        return self._grain > 0

    def needed(self, tokens: int) -> int:
        """Pages of a text of so many tokens, and what rounds write behind it."""
        most = -(-self._context // self._size)
        return min(-(-(min(tokens, self._context) + self._beyond) // self._size), most)

    def check(self, tokens: int) -> None:
        """Refuses a request that would wait for ever.

        Raises:
          InputError: it needs more pages than a slot can ever have.
        """
        needed = self.needed(tokens)
        if needed > self._each:
            raise InputError(
                f"a prompt and max_tokens of {tokens} tokens together need {needed} pages of "
                f"{self._size} positions, and there are {self._each}; lower --max_tokens, or raise "
                "--kv_memory"
            )

    def names(self, prompt: Sequence[int]) -> tuple[Digest, ...]:
        """What tells the pages of a prompt that may be shared from those of all others: a digest of
        all tokens up to the end of each."""
        if not self._grain:
            return ()
        count = (len(prompt) - 1) // (self._grain * self._size) * self._grain
        ids = np.asarray(prompt[: count * self._size], "<i8").reshape(count, self._size)
        names, name = [], b""
        for page in ids:
            name = hashlib.blake2b(name + page.tobytes(), digest_size=32).digest()
            names.append(name)
        return tuple(names)

    def take(
        self, slot: int, tokens: int, names: Sequence[Digest] = (), spare: int = 0
    ) -> Taken | None:
        """The pages of a request in a free slot; None where there are not enough.

        Args:
          tokens: that they are for.
          names: of its prompt's pages.
          spare: pages that are to be left for others.
        """
        group, needed = self._group(slot), self.needed(tokens)
        known = self._known(group, names)
        kept = len(group.kept) - sum(page in group.kept for page in known)
        if needed - len(known) > len(group.free) + kept - spare:
            return None
        for page in known:  # before others are forgotten
            group.use(page)
        pages = *known, *group.take(needed - len(known))
        self._held[slot] = _Held(pages, names, len(known))
        return Taken(pages, len(known) * self._size)

    def grow(self, slot: int, tokens: int) -> bool:
        """Gives a slot more pages, as many as a text of so many tokens needs; False where there are
        not enough, and it gets none."""
        held, group = self._held[slot], self._group(slot)
        more = self.needed(tokens) - len(held.pages)
        if more > len(group.free) + len(group.kept):
            return False
        held.pages = *held.pages, *group.take(more)
        return True

    def pages(self, slot: int) -> tuple[int, ...]:
        """All that a slot has."""
        return self._held[slot].pages

    def beside(self, slot: int, other: int) -> bool:
        """Whether two slots take their pages from the same ones."""
        return self._group(slot) is self._group(other)

    def best(self, slots: Sequence[int], names: Sequence[Digest]) -> list[int]:
        """Free slots for a request, those first whose group knows most of its prompt."""
        return sorted(slots, key=lambda slot: -len(self._known(self._group(slot), names)))

    def fill(self, slot: int, positions: int) -> None:
        """Both roles were asked to fill these first positions of a slot: others may reuse them."""
        held = self._held[slot]
        group, end = self._group(slot), min(positions // self._size, len(held.names))
        for index in range(held.filled, end):
            page, name = held.pages[index], held.names[index]
            if name not in group.by_name:
                group.by_name[name], group.names[page] = page, name
        held.filled = max(held.filled, end)

    def give_back(self, slot: int) -> None:
        """Takes back what a slot has, if anything. Of what stays known, the end of a text is
        forgotten before its beginning."""
        held = self._held.pop(slot, None)
        for page in () if held is None else reversed(held.pages):
            self._group(slot).leave(page)

    def _group(self, slot: int) -> _Group:
        return self._groups[slot // self._share]

    def _known(self, group: _Group, names: Sequence[Digest]) -> list[int]:
        """Pages that have the beginning of a prompt."""
        known: list[int] = []
        for name in names:
            if name not in group.by_name:
                break
            known.append(group.by_name[name])
        return known[: len(known) // self._grain * self._grain] if known else known
