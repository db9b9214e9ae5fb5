"""What callers hand to the engine and what they get back."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Literal

from ssd_jax.engine.grammar import Grammar
from ssd_jax.engine.origin import TextSpan
from ssd_jax.engine.request_metrics import RequestMetrics
from ssd_jax.errors import SsdError
from ssd_jax.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]
LengthLimit = Literal["max_tokens", "context"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete.

    Attributes:
      prompt_ids: token ids, at least one.
      prompt: the text that they were made of; None if they come from messages, or were given.
      params: sampling and stops. A seed of None is drawn when the request is made.
      index: sample index that keys the randomness (command line: prompt_index), 0 to 2^32 - 1. The
        same index, seed and prompt give the same text whatever the slot and the other requests.
        Where lengths of proposals depend on time, they give texts of the same distribution, each
        with noise of its own (`occurrences`).
      bad_word_ids: token ids of `params.bad_words`, see `bad_words.encoded`.
      grammar: compiled from `params.structured_outputs`; None without.
      k: most tokens that a round proposes for it, at most the engine's K; 0 decodes it without a
        draft. None is the engine's K, or fewer while that is faster (mode auto).
      branches: whether the draft of an engine of mode ssd prepares branches for it; without them it
        drafts just in time, as in mode sd. None does, or does not while that is faster (mode auto).
      priority: requests of a lower one enter slots first; see `waiting_queue.rank`.
      visible_ids: special tokens that the text shows though it shows no others.
    """

    prompt_ids: Sequence[int]
    prompt: str | None = None
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    index: int = 0
    bad_word_ids: Sequence[Sequence[int]] = ()
    grammar: Grammar | None = None
    k: int | None = None
    branches: bool | None = None
    priority: int = 0
    visible_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.params.seed is None:
            drawn = dataclasses.replace(self.params, seed=secrets.randbits(64))
            object.__setattr__(self, "params", drawn)

    def split(self, prompts: int) -> list[Request]:
        """A request for each of its `params.n` texts, all of one seed.

        Args:
          prompts: number of prompts P; text s of prompt p has the index p + s P.
        """
        params = dataclasses.replace(self.params, n=1)
        return [
            dataclasses.replace(self, params=params, index=self.index + text * prompts)
            for text in range(self.params.n)
        ]


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of a token and of the likeliest ones at its position.

    Attributes:
      top: (token id, log-probability), likeliest first; ids that cannot be drawn are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """A finished text.

    Attributes:
      index: its place among the texts of its prompt.
      prompt_index: the `Request.index` that keyed its randomness.
      seed: the seed, drawn or given; with `prompt_index` it repeats the text.
      token_ids: generated ids, with the stop id that ended them.
      text: without the stop and special tokens, unless the parameters ask for them.
      finish_reason: why it ended.
      stop_reason: the stop string, or the id of `stop_token_ids`, that ended it; None where another
        EOS token or no stop did.
      limit: what a `finish_reason` of "length" reached, `max_tokens` or the context; else None.
      error: why it ended with "error", where that is known to be the text's own: an `InputError`
        where the request is to blame; else None.
      metrics: every key of `RequestMetrics`; None where it does not apply.
      logprobs: one entry a token, if the request asked for them.
    """

    index: int = 0
    prompt_index: int
    seed: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    limit: LengthLimit | None = None
    error: SsdError | None = None
    metrics: RequestMetrics
    logprobs: list[TokenLogprobs] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The text's natural log-probability, the sum over its tokens; None without `logprobs`."""
        return None if self.logprobs is None else sum(token.logprob for token in self.logprobs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The finished texts of a prompt, in vLLM's shape.

    What describes a text is in `outputs`. For prompts with one text, attributes of the same names
    (`text`, `token_ids`, ...) are those of the first.

    Attributes:
      request_id: of the first text's events; `TokenEvent.request_id`.
      prompt: its text as it was given, without a chat template; None for messages and ids.
      prompt_token_ids: the ids that the model has read.
      outputs: the texts, `SamplingParams.n` of them.
      prompt_logprobs: one entry a prompt token, if the request asked for them: None for the first
        token, which follows nothing; empty if the request ended before its prompt was read.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        """True: there is no output of a request that is running."""
        return True

    @property
    def prompt_index(self) -> int:
        """`CompletionOutput.prompt_index` of the first text."""
        return self.outputs[0].prompt_index

    @property
    def seed(self) -> int:
        """`CompletionOutput.seed`, which all texts share."""
        return self.outputs[0].seed

    @property
    def token_ids(self) -> list[int]:
        """`CompletionOutput.token_ids` of the first text."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """`CompletionOutput.text` of the first text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """`CompletionOutput.finish_reason` of the first text."""
        return self.outputs[0].finish_reason

    @property
    def limit(self) -> LengthLimit | None:
        """`CompletionOutput.limit` of the first text."""
        return self.outputs[0].limit

    @property
    def metrics(self) -> RequestMetrics:
        """`CompletionOutput.metrics` of the first text."""
        return self.outputs[0].metrics

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """`CompletionOutput.logprobs` of the first text."""
        return self.outputs[0].logprobs


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One output with the texts of several outputs of the same prompt, in their order."""
    texts = [text for output in outputs for text in output.outputs]
    numbered = [dataclasses.replace(text, index=index) for index, text in enumerate(texts)]
    return dataclasses.replace(outputs[0], outputs=numbered)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """New tokens of one request; concatenated events equal the output.

    Attributes:
      spans: the text by token, each with where the token comes from; joined they are `text`.
      output: set on the request's last event only.
      time: when it was made, in seconds of `time.monotonic`.
    """

    request_id: int
    prompt_index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    spans: list[TextSpan] = dataclasses.field(default_factory=list)
    output: RequestOutput | None = None
    time: float = dataclasses.field(default_factory=time.monotonic, compare=False)
