"""Which requests are in slots, with which pages, and which wait. Pure host code."""

from __future__ import annotations

import operator
from collections import deque
from typing import NamedTuple

from ssd_jax.engine.page_stock import PageStock, Taken
from ssd_jax.engine.request import Request
from ssd_jax.engine.request_state import RequestState

_AGE = operator.attrgetter("request_id")


class Seat(NamedTuple):
    """A free slot for a request, and the pages that it would have there."""

    slot: int
    state: RequestState
    taken: Taken


class Seats:
    """Requests enter free slots in their order. One that was put off comes before all that wait.

    Args:
      slots: of the engine.
      pages: that slots share; None where each has its own.

    Attributes:
      waiting: requests without a slot, in their order.
      running: those in slots, by slot.
    """

    def __init__(self, slots: int, pages: PageStock | None) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: dict[int, RequestState] = {}
        self._slots, self._pages = slots, pages

    @property
    def all(self) -> list[RequestState]:
        """Every request that is not over."""
        return [*self.running.values(), *self.waiting]

    @property
    def prefilled(self) -> bool:
        """Whether no prompt of those in slots is left to run."""
        return all(state.sequence.prefilled for state in self.running.values())

    def names(self, request: Request) -> tuple[bytes, ...]:
        """What its pages are known by, see `PageStock.names`.

        Raises:
          InputError: it needs more pages than a slot can ever have.
        """
        if self._pages is None:
            return ()
        self._pages.check(_most_tokens(request))
        return self._pages.names(request.prompt_ids)

    def offer(self) -> Seat | None:
        """A free slot for the first request that waits; None where there is none, or no pages."""
        free, pages = self._free(), self._pages
        if not self.waiting or not free:
            return None
        state = self.waiting[0]
        if pages is None:
            return Seat(free[0], state, Taken((), 0))
        if pages.shares and not self.prefilled:
            return None  # it may come to share what is being run, and its prompt would wait anyway
        tokens = state.sequence.size if pages.grows else _most_tokens(state.request)
        for slot in pages.best(free, state.page_names):
            # So that those that run can grow for a while before one is put off again.
            spare = len(self._beside(slot)) if pages.grows else 0
            taken = pages.take(slot, tokens, state.page_names, spare)
            if taken is not None:
                return Seat(slot, state, taken)
        return None

    def enter(self, seat: Seat) -> None:
        """The request has the slot."""
        slot, state, taken = seat
        self.waiting.remove(state)
        self.running[slot] = state
        state.slot, state.reused, state.pages = slot, taken.reused, len(taken.pages)
        if self._pages is not None:
            times = state.times
            times.kv_pages, times.preemptions = state.pages, times.preemptions or 0
            if times.cached_tokens is None:
                times.cached_tokens = taken.reused

    def leave(self, state: RequestState) -> None:
        """A request is over, whether it runs or waits."""
        if state.slot < 0:
            self.waiting.remove(state)
        elif self.running.get(state.slot) is state:
            del self.running[state.slot]

    def share(self) -> None:
        """Lets others have the pages that both roles were asked to fill."""
        if self._pages is not None:
            for slot, state in self.running.items():
                self._pages.fill(slot, state.sequence.cached)

    def grow(self, *, puts_off: bool) -> bool:
        """Gives those that run the pages that the next round writes to, the oldest first.

        Args:
          puts_off: where there are no more, the youngest that takes from the same ones waits again.

        Returns: whether all that run have them.
        """
        pages = self._pages
        if pages is None or not pages.grows:
            return True
        self._free()
        for state in sorted(self.running.values(), key=_AGE):
            while state.slot >= 0 and not pages.grow(state.slot, state.sequence.size):
                if not puts_off:
                    return False
                self._put_off(max(self._beside(state.slot), key=_AGE))
        return True

    def grown(self) -> list[tuple[RequestState, tuple[int, ...]]]:
        """Requests that have more pages than the roles know of."""
        if self._pages is None:
            return []
        found = [(state, self._pages.pages(slot)) for slot, state in self.running.items()]
        return [(state, pages) for state, pages in found if len(pages) > state.pages]

    def _free(self) -> list[int]:
        """Slots without a request, whose pages come back."""
        free = [slot for slot in range(self._slots) if slot not in self.running]
        if self._pages is not None:
            for slot in free:
                self._pages.give_back(slot)
        return free

    def _beside(self, slot: int) -> list[RequestState]:
        """Requests that run with pages of the same ones as a slot's."""
        assert self._pages is not None
        running = self.running.items()
        return [state for other, state in running if self._pages.beside(slot, other)]

    def _put_off(self, state: RequestState) -> None:
        """Its keys and values are dropped; in another slot it goes on from its tokens."""
        assert self._pages is not None
        del self.running[state.slot]
        self._pages.give_back(state.slot)
        state.put_off()
        self.waiting.appendleft(state)


def _most_tokens(request: Request) -> int:
    """Of a request, prompt and output."""
    return len(request.prompt_ids) + request.params.max_tokens
