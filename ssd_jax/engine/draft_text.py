"""Gives a drafter the text: prompts as the target reads them, and what rounds without it commit.

Pure host code.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from ssd_jax.engine.request_state import RequestState
from ssd_jax.roles.protocols import Drafter

_AGE = operator.attrgetter("request_id")


class DraftText:
    """Prefills a drafter for the requests that rounds propose for.

    Args:
      chunk: most tokens of a prefill, of those that must be run.
    """

    def __init__(self, drafter: Drafter, chunk: int) -> None:
        self._drafter, self._chunk = drafter, chunk

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
            end = max(state.drafted, state.reused) + budget
            # A proposal must not follow a text that was not said to have ended.
            last = end >= sequence.size - len(state.last)
            budget -= self._prefill(state, sequence.size if last else end, last=last)
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
        return max(end - max(begin, state.reused), 0)
