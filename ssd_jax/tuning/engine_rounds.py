"""Rounds of mode sd as an engine runs them, with the host's work, on texts that nobody reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.rounds.timer import RoundTimer
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.roles.protocols import Drafter, Target
from ssd_jax.roles.records import DraftBatch, Drafted
from ssd_jax.sampling.params import SamplingParams

_MAX_TEXT = 256  # most tokens of a text
_MAX_STEPS = 4  # rounds of which one shall be timed from outcome to outcome


class _NoText:
    """A `DecodeStream` of no text."""

    def __init__(
        self, last_of_prompt: int, *, skip_special: bool, visible_ids: Collection[int]
    ) -> None:
        del last_of_prompt, skip_special, visible_ids

    def push(self, ids: Iterable[int]) -> str:
        """No token has any text."""
        del ids
        return ""

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


class TimedProposal(NamedTuple):
    """A proposal for a batch.

    Attributes:
      rows: that it is for.
      room: tokens that the shortest of them may still commit.
      seconds: that it took.
    """

    rows: int = 0
    room: int = 0
    seconds: float = 0.0


class FullProposals:
    """A `Drafter` that lets another propose, and gives every row a proposal of exactly K tokens.

    A drafter that knows fewer leaves tokens behind them that no proposal has; they are verified as
    any others are, and it is their time that matters, not their acceptance.

    Attributes:
      length: K of the next rounds, at most the drafter's.
      waits: whether `propose` waits until the tokens are there.
      last: the last proposal.
    """

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self.k, self.on_device = drafter.k, drafter.on_device
        self.timed = self.timed_in_turn = False
        self.asks_first, self.branches = drafter.asks_first, drafter.branches
        self.open, self.set_pages = drafter.open, drafter.set_pages
        self.prefill, self.gather = drafter.prefill, drafter.gather
        self.speculate, self.proposal = drafter.speculate, drafter.proposal
        self._drafter, self._clock = drafter, clock
        self.length, self.waits = drafter.k, False
        self.last = TimedProposal()

    def propose(self, batch: DraftBatch) -> Drafted:
        """Proposes exactly `length` tokens in every row."""
        limit = np.minimum(batch.limit, self.length)
        start = self._clock()
        answer = self._drafter.propose(batch._replace(limit=limit))
        if self.waits:
            jax.block_until_ready(answer.tokens)
        room = int(batch.room[batch.slots].min())
        self.last = TimedProposal(len(batch.slots), room, self._clock() - start)
        return dataclasses.replace(answer, lengths=limit)


class EngineRounds:
    """Runs rounds of mode sd in the first slots, with a K of its own for each call.

    Args:
      target, drafter: with empty slots.
      prompts: of the slots' texts, of one length.
      pages: the stock of pages that slots share, if they do.
      clock: seconds.

    Attributes:
      rows: number of slots with a text; all at first.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompts: Sequence[list[int]],
        *,
        pages: PageStock | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._drafter, self._clock = FullProposals(drafter, clock), clock
        # Of the rounds that were timed. Not a method that reports them: in a circle with the
        # engine, it would keep a model's arrays until garbage is collected.
        seconds: list[float] = []
        self._seconds = seconds
        self._engine = Engine(
            target,
            _NoText,
            frozenset(),
            drafter=self._drafter,
            pages=pages,
            clock=clock,
            timer=RoundTimer(lambda timed: seconds.append(timed.seconds)),
        )
        self.rows, self._chunk, self._prompts = target.slots, target.max_chunk, prompts
        self._branches = False if drafter.branches else None
        self._max_tokens = min(_MAX_TEXT, target.context - len(prompts[0]))
        self._texts: list[int] = []

    def begin(self, k: int, rounds: int = _MAX_STEPS + 1) -> bool:
        """Makes ready for rounds of K tokens; returns whether there is room for so many."""
        # One more is in flight, and at the end a round is shorter.
        room = (rounds + 2) * (k + 1)
        self._drafter.length = k
        if room > self._max_tokens:
            return False
        last = self._drafter.last
        if last.rows != self.rows or last.room < room:
            self._begin_texts()
        return self._drafter.last.rows == self.rows and self._drafter.last.room >= room

    def run(self) -> float:
        """Runs a round behind another; returns its seconds, from outcome to outcome.

        A step's own time would leave out what ran during the end of the step before, which other
        work may draw out. Where every outcome is there before the step that reads it, the host sets
        the pace, and the time of several steps counts.
        """
        self._engine.step()
        self._seconds.clear()
        start = self._clock()
        for _ in range(_MAX_STEPS):
            self._engine.step()
            if self._seconds:
                return self._seconds[0]
        return (self._clock() - start) / _MAX_STEPS

    def draft(self) -> float:
        """Runs a round that waits for its proposal; returns the seconds until that was there."""
        self._drafter.waits = True
        self._engine.step()
        self._drafter.waits = False
        return self._drafter.last.seconds

    def _begin_texts(self) -> None:
        """Begins the texts, and ends the ones before."""
        for request_id in self._texts:
            self._engine.cancel(request_id, silent=True)
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True)
        requests = [
            Request(
                prompt_ids=self._prompts[slot], params=params, index=slot, branches=self._branches
            )
            for slot in range(self.rows)
        ]
        self._texts = [self._engine.add(request) for request in requests]
        self._drafter.last = TimedProposal()
        # A step reads at least a chunk; where pages do not suffice for all texts, no step helps.
        for _ in range(self.rows * -(-len(self._prompts[0]) // self._chunk) + 2):
            if self._drafter.last.rows == self.rows:
                return
            self._engine.step()
