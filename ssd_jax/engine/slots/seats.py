"""Assigns slots and pages to requests, and queues those that wait. Pure host code."""

from __future__ import annotations

from typing import NamedTuple

from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.slots.page_stock import PageGrant, PageStock
from ssd_jax.engine.slots.waiting_queue import WaitingQueue, rank

_RUN_AGAIN = 1  # tokens before those that a role lacks which a draft may run again


class Seat(NamedTuple):
    """A free slot for a request, and the pages that it would have there."""

    slot: int
    state: RequestState
    pages: PageGrant


class EngineLoad(NamedTuple):
    """How busy an engine is.

    Attributes:
      running, waiting: requests in slots, and without one.
      used_pages, pages: of keys and values: those that requests hold, and all; 0 where each slot
        has its own.
    """

    running: int
    waiting: int
    used_pages: int
    pages: int


class Seats:
    """Requests enter free slots in order; a preempted request returns to its place in the queue.

    Args:
      slots: number of slots of the engine.
      pages: stock that slots share; None where each slot has its own pages.

    Attributes:
      waiting: requests without a slot, in order.
      running: requests in slots, by slot.
    """

    def __init__(self, slots: int, pages: PageStock | None) -> None:
        self.waiting = WaitingQueue()
        self.running: dict[int, RequestState] = {}
        self._slots, self._pages = slots, pages

    @property
    def all(self) -> list[RequestState]:
        """All requests that have not ended."""
        return [*self.running.values(), *self.waiting]

    @property
    def reach(self) -> int:
        """Slots up to the highest that has a request, or gets one of those that wait."""
        requests = min(len(self.running) + len(self.waiting), self._slots)
        return max(max(self.running, default=0) + 1, requests)

    @property
    def prefilled(self) -> bool:
        """Whether all requests in slots are prefilled."""
        return all(state.sequence.prefilled for state in self.running.values())

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that requests hold, and all pages; see `EngineLoad`."""
        return (0, 0) if self._pages is None else (self._pages.used, self._pages.count)

    def names(self, request: Request, *, drafted: bool) -> tuple[bytes, ...]:
        """Names of its prompt's pages; see `PageStock.names`.

        Args:
          drafted: whether the draft's pages are filled, too.
        """
        kind = b"" if drafted else b"target"
        return () if self._pages is None else self._pages.names(request.prompt_ids, kind)

    def offer(self) -> Seat | None:
        """A free slot for the first waiting request; None without a request, slot or pages."""
        free, pages = self._free(), self._pages
        state = self.waiting.first
        if state is None or not free:
            return None
        if pages is None:
            return Seat(free[0], state, PageGrant((), 0))
        if pages.shares and not self.prefilled:
            return None  # it may yet share what is being prefilled, and would wait for it anyway
        tokens = state.sequence.size if pages.grows else _most_tokens(state.request)
        for slot in pages.best(free, state.page_names if state.reuses else ()):
            # So that running requests can grow for a while before one is preempted again.
            spare = len(self._neighbours(slot)) if pages.grows else 0
            grant = pages.take(slot, tokens, state.page_names, spare, reuses=state.reuses)
            if grant is not None:
                return Seat(slot, state, grant)
        return None

    def enter(self, seat: Seat) -> None:
        """Puts the request in the slot."""
        slot, state, grant = seat
        self.waiting.enter(state)
        self.running[slot] = state
        state.slot, state.reused, state.pages = slot, grant.reused, len(grant.pages)
        if self._pages is not None:
            times = state.times
            times.kv_pages, times.preemptions = state.pages, times.preemptions or 0
            if times.cached_tokens is None:
                times.cached_tokens = grant.reused

    def leave(self, state: RequestState) -> None:
        """Removes a request that has ended, running or waiting, if it has not left already."""
        if state.slot < 0:
            self.waiting.remove(state)
        elif self.running.get(state.slot) is state:
            del self.running[state.slot]

    def share(self) -> None:
        """Lets other requests reuse pages that both roles were asked to fill, and takes back those
        that no query sees any more."""
        if self._pages is not None:
            for slot, state in self.running.items():
                self._pages.fill(slot, _filled(state))
            self._release(self._pages)

    def grow(self, *, puts_off: bool) -> bool:
        """Gives running requests the pages that the next round writes to, by rank.

        Args:
          puts_off: when pages run out, preempts the last in rank of the same group of pages.

        Returns: whether all running requests have their pages.
        """
        pages = self._pages
        if pages is None or not pages.grows:
            return True
        self._free()
        self._release(pages)
        for state in sorted(self.running.values(), key=rank):
            while state.slot >= 0 and not pages.grow(state.slot, state.sequence.size):
                if not puts_off:
                    return False
                self._put_off(max(self._neighbours(state.slot), key=rank))
        return True

    def grown(self) -> list[tuple[RequestState, tuple[int, ...]]]:
        """Requests with more pages than the roles know of, and all their pages."""
        if self._pages is None:
            return []
        holders = [(state, self._pages.pages(slot)) for slot, state in self.running.items()]
        return [(state, pages) for state, pages in holders if len(pages) > state.pages]

    def _release(self, pages: PageStock) -> None:
        """Takes back pages that no query sees any more."""
        for slot, state in self.running.items():
            pages.release_hidden(slot, _filled(state) - _RUN_AGAIN)

    def _free(self) -> list[int]:
        """Slots without a request; their pages are given back."""
        free = [slot for slot in range(self._slots) if slot not in self.running]
        if self._pages is not None:
            for slot in free:
                self._pages.give_back(slot)
        return free

    def _neighbours(self, slot: int) -> list[RequestState]:
        """Running requests with pages from the same group as a slot."""
        assert self._pages is not None
        running = self.running.items()
        return [state for other, state in running if self._pages.same_group(slot, other)]

    def _put_off(self, state: RequestState) -> None:
        """Preempts a request: drops its keys and values; later it continues from its tokens."""
        assert self._pages is not None
        del self.running[state.slot]
        self._pages.give_back(state.slot)
        state.put_off()
        self.waiting.add(state)


def _filled(state: RequestState) -> int:
    """First positions that both roles were asked to fill."""
    end = state.sequence.cached
    return min(end, state.drafted) if state.most_proposed else end


def _most_tokens(request: Request) -> int:
    """Most tokens of a request, prompt and output together."""
    return len(request.prompt_ids) + request.params.most_tokens
