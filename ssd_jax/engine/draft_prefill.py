"""Gives a drafter the text: prompts as the target reads them, and what rounds without it commit.

Pure host code.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

from ssd_jax.engine.requests.state import RequestState
from ssd_jax.roles.protocols import Drafter

_AGE = operator.attrgetter("request_id")


class DraftPrefill:
    """Prefills a drafter for the requests that rounds propose for.

    Args:
      chunk: most tokens of a prefill, of those that must be run.
    """

    def __init__(self, drafter: Drafter, chunk: int) -> None:
        self._drafter, self._chunk = drafter, chunk

    @staticmethod
    def proposes(rows: Iterable[tuple[int, RequestState]], slots: Collection[int]) -> None:
        """Takes which of a round's rows the drafter proposes for: it was given their whole text,
        and lacks the tokens of the others from now on."""
        for slot, state in rows:
            state.follows = slot in slots
            if state.follows:
                state.drafted = state.sequence.size

    def follow_prompts(self, states: Iterable[RequestState]) -> None:
        """Gives it the next tokens of prompts that the target was given."""
        for state in states:
            sequence = state.sequence
            if state.k and not (sequence.prefilled and sequence.output):
                end = min(max(state.drafted, state.reused) + self._chunk, sequence.given)
                self._prefill(state, end, last=end == sequence.to_prefill)

    def catch_up(self, states: Iterable[RequestState]) -> None:
        """Gives it committed tokens that no proposal told it of: a chunk a round in all, those of
        the oldest request first."""
        budget = self._chunk
        for state in sorted(states, key=_AGE):
            sequence = state.sequence
            if budget <= 0 or not state.k or sequence.room <= 1 or state.follows:
                continue
            end = min(max(state.drafted, state.reused) + budget, sequence.size)
            budget -= self._prefill(state, end, last=end == sequence.size)
            state.node = 0

    def _prefill(self, state: RequestState, end: int, *, last: bool) -> int:
        """Prefills a text up to `end`, its last token if it is the `last`.

        Returns: number of tokens that are run.
        """
        text, begin = state.sequence.text, state.drafted
        for offset in range(begin, end, self._chunk):
            stop = min(offset + self._chunk, end)
            self._drafter.prefill(state.slot, text[offset:stop], offset, last=last and stop == end)
            state.drafted = stop
        state.follows = last
        return max(end - max(begin, state.reused), 0)
