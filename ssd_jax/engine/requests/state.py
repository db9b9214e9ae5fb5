"""A request in the engine: its sequence, its text, its metrics, its log-probabilities."""

from __future__ import annotations

import dataclasses

from ssd_jax.engine.origin import Origin, origins, spans
from ssd_jax.engine.planner import RoundPlan
from ssd_jax.engine.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    TokenEvent,
    TokenLogprobs,
)
from ssd_jax.engine.requests.metrics import RequestTimes, RoundRecord
from ssd_jax.engine.requests.sequence import Sequence
from ssd_jax.engine.requests.stop_strings import Released, TextStream
from ssd_jax.engine.requests.token_logprobs import PromptLogprobs, entry
from ssd_jax.errors import InputError, SsdError
from ssd_jax.roles.records import Outcomes
from ssd_jax.sampling.params import SamplingParams

NO_NUMBERS = (
    "the target computes no numbers (NaN or infinity) for this text; its checkpoint is damaged, or "
    "too large for its dtype: try `dtype='float32'`, or fetch it again (if bad_words, "
    "min_tokens or a grammar ban all that it could generate here, ban less)"
)
"""Why a request ends where no token can be drawn."""


@dataclasses.dataclass(kw_only=True, eq=False)
class RequestState:
    """What the engine knows of a request.

    Attributes:
      slot: row of the batch that it occupies; -1 without a slot.
      page_names: names of its prompt's pages; see `PageStock.names`.
      reused: positions whose keys and values its pages held when it began.
      pages: number of its pages that the roles know of, where slots share them.
      params: how it is sampled; set once it has entered a slot.
      most_proposed: most tokens that a round may propose for it; 0 without a draft.
      k: most tokens that rounds propose for it now, by the engine's planner.
      branches: whether the draft prepares branches for it now, in an engine of mode ssd.
      drafted: first tokens of its text that the drafter was given.
      follows: whether it was given all of them, but those of the last round, which it is given with
        the batch of the next one.
      last: tokens that its last round committed.
      node: where in its tree of proposed tokens that round ended; see `Outcomes`.
      logprobs: of the committed tokens, if asked for.
      prompt_logprobs: of the prompt's tokens, if asked for.
      origins: of the committed tokens.
      overtaken: number of younger requests that entered slots while it waited for one.
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
    most_proposed: int = 0
    k: int = 0
    branches: bool = True
    drafted: int = 0
    follows: bool = False
    last: list[int] = dataclasses.field(default_factory=list)
    node: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    origins: list[Origin] = dataclasses.field(default_factory=list)
    overtaken: int = 0
    ended: bool = False

    def __post_init__(self) -> None:
        if self.request.params.logprobs is not None:
            self.logprobs = []
        count = self.request.params.prompt_logprobs
        if count is not None:
            self.prompt_logprobs = PromptLogprobs(self.request.prompt_ids, count)

    def follow(self, plan: RoundPlan) -> None:
        """Takes the plan of the next round, where its request leaves that open."""
        k, branches = self.request.k, self.request.branches
        self.k = min(plan.k if k is None else k, self.most_proposed)
        self.branches = plan.branches if branches is None else branches

    @property
    def finished(self) -> bool:
        """Whether its last token is known."""
        return self.sequence.finish_reason is not None

    @property
    def limit(self) -> int:
        """Most tokens that the next round proposes for it."""
        return max(min(self.k, self.sequence.room - 1), 0) if self.follows else 0

    @property
    def no_token(self) -> SsdError:
        """Why it ends where no token can be drawn; an `InputError` where it may have banned all."""
        params = self.request.params
        bans = (
            params.bad_words,
            params.min_tokens,
            params.logit_bias,
            self.request.grammar is not None,
        )
        return (InputError if any(bans) else SsdError)(NO_NUMBERS)

    @property
    def reuses(self) -> bool:
        """Whether it may take keys and values of others: such positions give no logits."""
        return self.prompt_logprobs is None or self.prompt_logprobs.complete

    def put_off(self) -> None:
        """Preempts it: it leaves its slot and waits for another."""
        self.slot, self.reused, self.pages, self.drafted, self.follows = -1, 0, 0, 0, False
        self.last = self.last[-1:]  # the drafter is given the others with the text
        self.sequence.rewind()
        self.times.preemptions = (self.times.preemptions or 0) + 1

    def commit(self, emitted: list[int], now: float) -> list[int]:
        """Takes the tokens that a round emitted; returns those that were committed."""
        if self.sequence.output:
            self.sequence.cached += len(emitted)
        tokens = self.last = self.sequence.commit(emitted)
        self.times.tokens += [now] * len(tokens)
        return tokens

    def record(self, outcomes: Outcomes, row: int, tokens: list[int], record: RoundRecord) -> None:
        """Records the round that committed these tokens.

        The program that gave the first token verified nothing and is no round.
        """
        self.origins += origins(record.source, record.accepted, len(tokens))
        if len(self.times.tokens) > len(tokens):
            record.truncate(len(tokens))
            self.times.rounds.append(record)
        count = self.request.params.logprobs
        if count is not None and self.logprobs is not None and outcomes.logprobs is not None:
            self.logprobs += [
                entry(outcomes.logprobs, row, place, token, count)
                for place, token in enumerate(tokens)
            ]

    def event(self, released: Released) -> TokenEvent:
        """New tokens and text."""
        end, log = len(self.text.token_ids), self.logprobs
        begin = end - len(released.token_ids)
        return TokenEvent(
            request_id=self.request_id,
            prompt_index=self.request.index,
            token_ids=released.token_ids,
            text=released.text,
            logprobs=None if log is None else log[begin:end],
            spans=spans(released.text, released.ends, self.origins[begin:end] or self.origins[-1:]),
        )

    def final(
        self, reason: FinishReason, released: Released, error: SsdError | None = None
    ) -> TokenEvent:
        """The last event, with the output; tokens past the end of the text do not count."""
        token_ids = self.text.token_ids
        self.times.keep(len(token_ids))
        request = self.request
        text = CompletionOutput(
            prompt_index=request.index,
            seed=request.params.seed_of_request,
            token_ids=token_ids,
            text=self.text.text,
            finish_reason=reason,
            stop_reason=self._stop(token_ids) if reason == "stop" else None,
            limit=self.sequence.limit if reason == "length" else None,
            error=error,
            metrics=self.times.summary(),
            logprobs=None if self.logprobs is None else self.logprobs[: len(token_ids)],
        )
        output = RequestOutput(
            request_id=self.request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_ids),
            outputs=[text],
            prompt_logprobs=self.prompt_logprobs and self.prompt_logprobs.entries(),
        )
        event = dataclasses.replace(self.event(released), output=output)
        self.ended = True
        return event

    def _stop(self, token_ids: list[int]) -> str | int | None:
        """The stop string or the request's own stop id that ended the text."""
        if self.text.stop is not None:
            return self.text.stop
        return token_ids[-1] if token_ids[-1] in self.request.params.stop_token_ids else None
