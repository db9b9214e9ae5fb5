"""A request on its way through the engine: its sequence, its text, its figures, its log."""

from __future__ import annotations

import dataclasses

import numpy as np

from ssd_jax.runtime.metrics import Plan, RequestTimes, Verified
from ssd_jax.runtime.request import (
    FinishReason,
    Request,
    RequestOutput,
    TokenEvent,
    TokenLogprobs,
)
from ssd_jax.runtime.roles import DraftRow, Outcomes, TopLogprobs
from ssd_jax.runtime.sequence import Sequence
from ssd_jax.runtime.stop_strings import Released, TextStream


@dataclasses.dataclass(kw_only=True, eq=False)
class Job:
    """Attributes:
    sequence: committed tokens, once it has a slot.
    prompted, told: tokens of the prompt and of the output that the drafter knows.
    logprobs: of the committed tokens, if asked for.
    ended: whether its last event was made.
    """

    request_id: int
    request: Request
    text: TextStream
    times: RequestTimes
    sequence: Sequence | None = None
    prompted: int = 0
    told: int = 0
    logprobs: list[TokenLogprobs] | None = None
    ended: bool = False

    @property
    def finished(self) -> bool:
        """Whether its last token is known."""
        return self.sequence is not None and self.sequence.finish_reason is not None

    def commit(
        self,
        outcomes: Outcomes,
        row: int,
        plan: Plan,
        seconds: float,
        now: float,
    ) -> list[int]:
        """Takes a round's outcome from a row; returns the tokens that were committed.

        Args:
          plan: of this row.
          seconds: from the round's dispatch until now.
        """
        sequence = self.sequence
        assert sequence is not None
        first = not sequence.output
        accepted = int(outcomes.accepted[row])
        emitted = [int(token) for token in outcomes.tokens[row, : accepted + 1]]
        if not first:
            sequence.cached += len(emitted)
        tokens = sequence.commit(emitted)
        self.times.committed(len(tokens), now)
        if not first:
            verified = Verified(
                committed=len(emitted),
                accepted=accepted,
                seconds=seconds,
                read=now,
                **vars(plan),
            )
            if len(tokens) < len(emitted):
                verified.truncate(len(tokens))
            self.times.verified(verified)
        wanted = self.request.params.logprobs
        if wanted is not None and outcomes.logprobs is not None:
            log = self.logprobs = self.logprobs or []
            log += [
                _logprobs(outcomes.logprobs, row, place, token, wanted)
                for place, token in enumerate(tokens)
            ]
        return tokens

    def draft_row(self, k: int) -> DraftRow | None:
        """What the drafter needs for the next round; None where only the bonus token has room."""
        sequence = self.sequence
        assert sequence is not None
        limit = min(k, sequence.room - 1)
        if limit < 1:
            return None
        untold = sequence.output[self.told :]
        return DraftRow(sequence.slot, sequence.cached, untold, limit, sequence.room)

    def event(self, released: Released) -> TokenEvent:
        """New tokens and text."""
        end = len(self.text.token_ids)
        log = self.logprobs
        return TokenEvent(
            request_id=self.request_id,
            prompt_index=self.request.index,
            token_ids=released.token_ids,
            text=released.text,
            logprobs=None if log is None else log[end - len(released.token_ids) : end],
        )

    def cut_off(self, reason: FinishReason) -> TokenEvent:
        """The last event of a request that did not come to its own end: with what it has."""
        return self.final(reason, self.text.cut())

    def final(self, reason: FinishReason, released: Released) -> TokenEvent:
        """The last event, with the output; nothing past the end of the text counts."""
        kept = self.text.token_ids
        self.times.keep(len(kept))
        output = RequestOutput(
            prompt_index=self.request.index,
            token_ids=kept,
            text=self.text.text,
            finish_reason=reason,
            metrics=self.times.summary(),
            logprobs=None if self.logprobs is None else self.logprobs[: len(kept)],
        )
        event = dataclasses.replace(self.event(released), output=output)
        self.ended = True
        return event


def _logprobs(log: TopLogprobs, row: int, place: int, token: int, count: int) -> TokenLogprobs:
    pairs = zip(log.ids[row, place, :count], log.values[row, place, :count], strict=True)
    top = tuple((int(i), float(value)) for i, value in pairs if np.isfinite(value))
    return TokenLogprobs(token, float(log.chosen[row, place]), top)
