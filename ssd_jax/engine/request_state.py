"""A request on its way through the engine: its sequence, its text, its figures, its log."""

from __future__ import annotations

import dataclasses

import numpy as np

from ssd_jax.engine.metrics import RequestTimes, RoundRecord
from ssd_jax.engine.request import FinishReason, Request, RequestOutput, TokenEvent, TokenLogprobs
from ssd_jax.engine.sequence import Sequence
from ssd_jax.engine.stop_strings import Released, TextStream
from ssd_jax.roles.records import Outcomes, TopLogprobs
from ssd_jax.sampling.params import SamplingParams


@dataclasses.dataclass(kw_only=True, eq=False)
class RequestState:
    """Attributes:
    slot: row of the batch that it occupies; -1 before that.
    page_names: of its prompt, see `PageStock.names`.
    reused: positions whose keys and values were in its pages when it began.
    pages: that the roles know of, where slots share them.
    params: how it is sampled, as it is known once it has entered a slot.
    prompted: tokens that the drafter was given of those that the target was.
    last: tokens that its last round has committed.
    logprobs: of the committed tokens, if asked for.
    ended: whether its last event was made.
    """

    request_id: int
    request: Request
    text: TextStream
    times: RequestTimes
    sequence: Sequence
    slot: int = -1
    page_names: tuple[bytes, ...] = ()
    reused: int = 0
    pages: int = 0
    params: SamplingParams | None = None
    prompted: int = 0
    last: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    ended: bool = False

    @property
    def finished(self) -> bool:
        """Whether its last token is known."""
        return self.sequence.finish_reason is not None

    def put_off(self) -> None:
        """It leaves its slot, and waits to go on in another."""
        self.slot, self.reused, self.pages, self.prompted = -1, 0, 0, 0
        self.last = self.last[-1:]  # the drafter is given the others with the text
        self.sequence.rewind()
        self.times.preemptions = (self.times.preemptions or 0) + 1

    def commit(self, emitted: list[int], now: float) -> list[int]:
        """Takes what a round has emitted; returns the tokens that were committed."""
        if self.sequence.output:
            self.sequence.cached += len(emitted)
        tokens = self.last = self.sequence.commit(emitted)
        self.times.tokens += [now] * len(tokens)
        return tokens

    def record(self, outcomes: Outcomes, row: int, tokens: list[int], known: RoundRecord) -> None:
        """Notes what a round that has committed these tokens was like; the first token's, which
        verified nothing, is no round."""
        if len(self.times.tokens) > len(tokens):
            known.truncate(len(tokens))
            self.times.rounds.append(known)
        wanted = self.request.params.logprobs
        if wanted is not None and outcomes.logprobs is not None:
            log = self.logprobs = self.logprobs or []
            log += [
                _logprobs(outcomes.logprobs, row, place, token, wanted)
                for place, token in enumerate(tokens)
            ]

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
