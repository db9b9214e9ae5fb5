"""How a request enters a slot: its sampling, with noise of its own where lengths depend on time.

Pure host code.
"""

from __future__ import annotations

import dataclasses

from ssd_jax.engine.planner import Planner
from ssd_jax.engine.requests.occurrences import Occurrences
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.slots.seats import Seat
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import SamplingParams


class Openings:
    """Makes the openings of an engine's slots; other arguments are as of `Engine`.

    Args:
      context: most positions of a sequence.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        planner: Planner | None,
        occurrences: Occurrences,
        context: int,
    ) -> None:
        self._drafter, self._occurrences, self._context = drafter, occurrences, context
        self._timed = any(chooser is not None and chooser.timed for chooser in (drafter, planner))

    def make(self, seat: Seat) -> SlotOpening:
        """The opening for a request, whose plan is set; it keeps its sampling when preempted."""
        state, request = seat.state, seat.state.request
        params = state.params = state.params or self._sampling_of(state)
        prompt = len(request.prompt_ids)
        return SlotOpening(
            seat.slot,
            params,
            request.index,
            sorted(state.sequence.stop_ids) if params.min_tokens else [],
            min(prompt + params.min_tokens, self._context),
            *seat.pages,
            prompt,
            request.bad_word_ids,
            state.branches,
            request.grammar is not None,
        )

    def _sampling_of(self, state: RequestState) -> SamplingParams:
        """Sampling of a request that begins."""
        request, drafter = state.request, self._drafter
        params = request.params
        if params.structured_outputs is not None:  # the host alone needs them
            params = dataclasses.replace(params, structured_outputs=None)
        if params.temperature == 0:
            return params
        seed = self._occurrences.seed(params.seed_of_request, request.index)
        timed = state.most_proposed > 0 and self._timed
        if drafter is not None and drafter.branches and request.k and request.branches is False:
            timed = drafter.timed_in_turn
        return dataclasses.replace(params, seed=seed) if timed else params
