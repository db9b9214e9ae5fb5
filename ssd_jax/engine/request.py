"""What callers hand to the engine and what they get back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from ssd_jax.engine.origin import TextSpan
from ssd_jax.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to complete.

    Attributes:
      prompt_ids: token ids, at least one.
      params: sampling and stops.
      index: sample index that keys the randomness (command line: prompt_index), 0 to 2^32 - 1. The
        same index, seed and prompt give the same text whatever the slot and the other requests.
        Where lengths of proposals depend on time, they give texts of the same distribution, each
        with noise of its own (`occurrences`).
      bad_word_ids: token ids of `params.bad_words`, see `bad_words.encoded`.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    index: int = 0
    bad_word_ids: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of a generated token and of the likeliest ones at its position.

    Attributes:
      top: (token id, log-probability), likeliest first; ids that cannot be drawn are left out.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
      prompt_index: the request's `index`.
      token_ids: generated ids, with the stop id that ended them.
      text: without special tokens and without the stop.
      metrics: every key of `metrics.REQUEST_KEYS`; None where it does not apply.
      logprobs: one entry a token, if the request asked for them.
    """

    prompt_index: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: dict[str, Any]
    logprobs: list[TokenLogprobs] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """New tokens of one request; concatenated events equal the output.

    Attributes:
      spans: the text by token, each with where the token comes from; joined they are `text`.
      output: set on the request's last event only.
    """

    request_id: int
    prompt_index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None
    spans: list[TextSpan] = dataclasses.field(default_factory=list)
    output: RequestOutput | None = None
