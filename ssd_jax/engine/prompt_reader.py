"""Requests enter free slots, and target and drafter read their prompts. Pure host code."""

from __future__ import annotations

from collections import deque

from ssd_jax.engine.draft_prefill import DraftPrefill
from ssd_jax.engine.event_reports import EventReports
from ssd_jax.engine.planner import RoundPlan
from ssd_jax.engine.rounds.log import InFlight, RoundLog
from ssd_jax.engine.rounds.masks import round_masks
from ssd_jax.engine.slots.openings import Openings
from ssd_jax.engine.slots.seats import Seats
from ssd_jax.engine.slots.waiting_queue import rank
from ssd_jax.errors import DeviceError
from ssd_jax.roles.protocols import Drafter, Target

_SHORT_PROMPTS = 4  # most that a step reads


class PromptReader:
    """Admits the requests of an engine and reads their prompts, by rank.

    Args:
      roles: all that have slots; the target is one of them.
      draft_prefill: gives the drafter the prompts; None where there is no drafter.
      in_flight: gets the program that ends a prompt, whose outcome is its first token.
    """

    def __init__(
        self,
        target: Target,
        roles: list[Target | Drafter],
        draft_prefill: DraftPrefill | None,
        *,
        seats: Seats,
        openings: Openings,
        log: RoundLog,
        reports: EventReports,
        in_flight: deque[InFlight],
    ) -> None:
        self._target, self._roles, self._draft_prefill = target, roles, draft_prefill
        self._seats, self._openings = seats, openings
        self._log, self._reports, self._in_flight = log, reports, in_flight

    def read(self, plan: RoundPlan) -> None:
        """Reads one whole chunk, or a few short prompts that fit into one, so as not to hold up
        running requests; requests enter slots that become free meanwhile."""
        budget = chunk = self._target.max_chunk
        while True:
            self._admit(plan)
            tokens = self._prefill(budget)
            if self._draft_prefill is not None:
                self._draft_prefill.follow_prompts(self._seats.running.values())
            self._seats.share()
            if not tokens:
                return
            budget -= max(tokens, chunk // _SHORT_PROMPTS)

    def _admit(self, plan: RoundPlan) -> None:
        if not self._seats.running:
            self._log.idle()
        while (seat := self._seats.offer()) is not None:
            state = seat.state
            state.follow(plan)
            opening = self._openings.make(seat)
            try:
                for role in self._roles:
                    role.open(opening)
            except DeviceError:
                raise
            except Exception as error:
                self._reports.fail(state, error)
                continue
            self._seats.enter(seat)

    def _prefill(self, budget: int) -> int:
        """Prefills the next chunk of the first request, in rank, whose prompt is not read.

        The first chunk also covers the positions whose keys and values the pages hold already.

        Args:
          budget: most tokens to run.

        Returns: number of tokens that are run; 0 if there are more than `budget`, or none.
        """
        unfinished = [
            (rank(state), slot)
            for slot, state in self._seats.running.items()
            if not state.sequence.prefilled
        ]
        if not unfinished:
            return 0
        _, slot = min(unfinished)
        state = self._seats.running[slot]
        sequence, prefilled = state.sequence, state.sequence.given
        begin = max(prefilled, state.reused)
        end = min(begin + self._target.max_chunk, sequence.to_prefill)
        if end - begin > budget:
            return 0
        chunk = sequence.text[prefilled:end]
        self._log.prompt()
        if end < sequence.to_prefill or sequence.output:
            self._target.prefill(slot, chunk, prefilled)
        else:
            masks = round_masks([(0, state)], 1, self._target, None, self._reports.fail)
            more = () if masks is None else (masks,)
            pending = self._target.prefill_last(slot, chunk, prefilled, *more)
            self._in_flight.append(InFlight(pending, [(0, state)], end))
        sequence.prefill(end)
        try:
            if state.prompt_logprobs is not None:
                state.prompt_logprobs.ask(self._target, slot, prefilled, end)
        except DeviceError:
            raise
        except Exception as error:
            self._reports.fail(state, error)
        return end - begin
