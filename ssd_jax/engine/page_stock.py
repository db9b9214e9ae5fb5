"""Pages of keys and values that slots take from a common stock: which request has which."""

from __future__ import annotations

from collections import deque

from ssd_jax.errors import InputError


class PageStock:
    """Free and taken pages. A request gets all that it may come to need when it enters a slot, so
    that none waits for pages in the middle of its text; the same ones for target and draft.

    Args:
      slots: of the engine.
      count: pages of all slots together; equal groups of slots have equal parts of them.
      size: positions of a page.
      beyond: positions that rounds may write behind the last token of a request.
      context: most positions of a request.
      groups: of slots whose devices have pages of their own.
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
    ) -> None:
        self._size, self._beyond, self._context = size, beyond, context
        self._each = count // groups
        self._share = slots // groups
        self._free = [
            deque(range(group * self._each, (group + 1) * self._each)) for group in range(groups)
        ]
        self._taken: dict[int, tuple[int, ...]] = {}

    def needed(self, tokens: int) -> int:
        """Pages of a request of so many tokens, prompt and output."""
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

    def take(self, slot: int, tokens: int) -> tuple[int, ...] | None:
        """The pages of a request in a free slot, in the order of their positions; None where there
        are not enough."""
        free, needed = self._free[slot // self._share], self.needed(tokens)
        if needed > len(free):
            return None
        self._taken[slot] = tuple(free.popleft() for _ in range(needed))
        return self._taken[slot]

    def give_back(self, slot: int) -> None:
        """Frees what a slot has, if anything."""
        self._free[slot // self._share].extend(self._taken.pop(slot, ()))
