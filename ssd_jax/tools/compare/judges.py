"""Whether rounding explains a fork: from settings alone, or from the target's own scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from ssd_jax.engine.request import Request
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.rules import RULES
from ssd_jax.tools.compare.pairs import Pair

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM
    from ssd_jax.tools.compare.scores import ForkScorer, Scores

Verdict = Literal["float", "wrong", "sampled", "unknown"]
"""float: the target finds the two tokens equal up to rounding. wrong: it does not, so at least one
of the runs did not write what the target says: a bug, or other settings. sampled: two draws of the
same distribution. unknown: nothing is known about the target there.
"""

LIMITS = {"float32": 1e-3, "bfloat16": 0.5, "int8": 0.5, "native": 0.5}
"""Margins, in logits, below which a dtype's rounding may decide between two tokens.

Between passes of different widths over one text, differences of logits among the five likeliest
tokens moved by at most 0.00008 (float32), 0.26 (bfloat16) and 0.14 (int8) on SmolLM2-135M. int8 and
native have bfloat16's limit: their attention runs in bfloat16.
"""


def judge(scores: Scores, limit: float, *, certain: bool, bitwise: bool) -> Verdict:
    """The verdict on a fork.

    Args:
      scores: from the target, after the common text.
      certain: whether both runs surely had the settings of the scores. If not, and neither token is
        near the best, the settings are to blame, and nothing is known.
      bitwise: whether both runs promised bitwise exactness, which leaves nothing to rounding.
    """
    ahead, behind = sorted((scores.a, scores.b), key=lambda token: token.score, reverse=True)
    # Whether rounding could make it the target's choice.
    is_near_best = (
        token.may_stay and scores.best - token.score < limit for token in (ahead, behind)
    )
    if not any(is_near_best):
        return "wrong" if certain else "unknown"
    close = scores.margin < limit or ahead.may_go
    return "float" if close and ahead.may_stay and behind.may_stay and not bitwise else "wrong"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Where two runs part, and why.

    Attributes:
      verdict: None where a run has no answer.
      margin: between the target's scores of the two tokens, in logits; infinite if one is banned,
        None if it is not known.
      texts: of the two tokens; None where there is no token or no tokenizer.
    """

    pair: Pair
    verdict: Verdict | None
    margin: float | None = None
    texts: tuple[str | None, str | None] = (None, None)


Judge = Callable[[Pair], Finding]


def without_model(params: SamplingParams, verify: str) -> Judge:
    """Judges from settings: texts are different draws, or nothing is known about them."""
    verdict: Verdict = "sampled" if _draws_differ(params, verify) else "unknown"
    return lambda pair: Finding(pair=pair, verdict=verdict)


class ModelJudge:
    """Judges by the target's scores at the fork; its weights load for the first one.

    Args:
      llm: the target.
      requests: as both runs had them, by prompt index.
      certain: whether both runs surely had these settings; see `judge`.
    """

    def __init__(self, llm: LLM, requests: Mapping[int, Request], *, certain: bool) -> None:
        self._llm, self._requests, self._certain = llm, requests, certain
        self.limit = LIMITS[llm.resolved.dtype]

    def __call__(self, pair: Pair) -> Finding:
        """The finding about a fork, or about a text that goes on where the other ended."""
        a, b = pair.tokens
        texts = self._text(a), self._text(b)
        request = self._requests[pair.prompt_index]
        if _draws_differ(request.params, self._llm.config.verify):
            return Finding(pair=pair, verdict="sampled", texts=texts)
        if a is None or b is None:  # settings decide where a text ends, not scores
            return Finding(pair=pair, verdict="wrong" if self._certain else "unknown", texts=texts)
        scores = self._scorer.scores(request, pair.common, a, b)
        verdict = judge(scores, self.limit, certain=self._certain, bitwise=self.bitwise)
        return Finding(pair=pair, verdict=verdict, margin=scores.margin, texts=texts)

    @property
    def bitwise(self) -> bool:
        """Whether both runs promised bitwise exactness.

        The loaded model tells if both runs surely had its settings; else the settings do.
        """
        promised = self._llm.loaded if self._certain else self._llm.config
        return promised.exact == "bitwise"

    @functools.cached_property
    def _scorer(self) -> ForkScorer:
        from ssd_jax.tools.compare.scores import ForkScorer  # imports JAX

        return ForkScorer(self._llm, self.limit)

    def _text(self, token: int | None) -> str | None:
        return (
            None
            if token is None
            else self._llm.tokenizer.decode([token], skip_special_tokens=False)
        )


def check_fits(llm: LLM, pairs: Sequence[Pair], requests: Mapping[int, Request]) -> None:
    """Refuses answers that cannot be of this model, before its weights load.

    Args:
      requests: by prompt index, of every prompt that both runs answered.

    Raises:
      InputError: an id that is no token, or a text beyond the context.
    """
    for pair in pairs:
        if not pair.compared:
            continue
        where = f"prompt_index {pair.prompt_index}"
        for output in pair.answers:
            top = max(output.token_ids, default=0)
            if top >= llm.tokenizer.size:
                raise InputError(
                    f"{where}: token id {top} is not in the vocabulary of {llm.config.target}, ids "
                    f"are 0 to {llm.tokenizer.size - 1}; give the `target` of both runs"
                )
        length = len(requests[pair.prompt_index].prompt_ids) + len(pair.common)
        if pair.kind != "identical" and length >= llm.context:
            raise InputError(
                f"{where} has {length} tokens before its texts part, the context is {llm.context}; "
                "raise `context` to that of both runs"
            )


def _draws_differ(params: SamplingParams, verify: str) -> bool:
    """Whether different modes may give different texts."""
    return params.temperature > 0 and not RULES[verify].keyed_by_position
