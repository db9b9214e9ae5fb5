"""Verdicts on differences, from settings alone or from the target's own scores."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ssd_jax.compare.findings import Finding, Judge
from ssd_jax.compare.pairs import Pair
from ssd_jax.compare.verdict import LIMITS, Verdict, judge
from ssd_jax.errors import InputError
from ssd_jax.runtime.request import Request, SamplingParams

if TYPE_CHECKING:
    from ssd_jax.compare.scores import Scorer
    from ssd_jax.llm import LLM


def without_model(params: SamplingParams, verify: str) -> Judge:
    """Judges from settings: differences are lawful draws, or nothing is known about them."""
    verdict: Verdict = "sampled" if _draws_differ(params, verify) else "unknown"
    return lambda pair: Finding(pair=pair, verdict=verdict)


class ModelJudge:
    """Judges by the target's scores at the fork; its weights load with the first one.

    Args:
      llm: the target.
      requests: as both runs had them, by prompt index.
      certain: whether both runs surely had these settings; see `verdict.judge`.
    """

    def __init__(self, llm: LLM, requests: Mapping[int, Request], *, certain: bool) -> None:
        self._llm, self._requests, self._certain = llm, requests, certain
        self.limit = LIMITS[llm.config.dtype]

    def __call__(self, pair: Pair) -> Finding:
        """The finding about a fork, or about a text that goes on where the other ended."""
        a, b = pair.tokens
        texts = self._text(a), self._text(b)
        request = self._requests[pair.prompt_index]
        if _draws_differ(request.params, self._llm.config.verify):
            return Finding(pair=pair, verdict="sampled", texts=texts)
        if a is None or b is None:  # settings decide where a text ends, not scores
            return Finding(pair=pair, verdict="law" if self._certain else "unknown", texts=texts)
        scores = self._scorer.scores(request, pair.common, a, b)
        verdict = judge(scores, self.limit, certain=self._certain, bitwise=self.bitwise)
        return Finding(pair=pair, verdict=verdict, margin=scores.margin, texts=texts)

    @property
    def bitwise(self) -> bool:
        """Whether both runs promised bitwise exactness: as this model does if they were its own,
        else as the settings demand."""
        if self._certain:
            return self._llm.loaded.exact == "bitwise"
        return self._llm.config.exact == "bitwise"

    @functools.cached_property
    def _scorer(self) -> Scorer:
        from ssd_jax.compare.scores import Scorer

        return Scorer(self._llm, self.limit)

    def _text(self, token: int | None) -> str | None:
        return None if token is None else self._llm.tokenizer.decode([token], skip_special=False)


def check_fits(llm: LLM, pairs: Sequence[Pair], requests: Mapping[int, Request]) -> None:
    """Refuses answers that cannot be of this model, before its weights load.

    Args:
      llm: the target.
      pairs: the answers.
      requests: by prompt index, of every prompt that both runs answered.

    Raises:
      InputError: an id that is no token, or a text beyond the context.
    """
    for pair in pairs:
        where = f"prompt_index {pair.prompt_index}"
        if not pair.compared:
            continue
        for output in (pair.a, pair.b):
            top = max(output.token_ids, default=0) if output is not None else 0
            if top >= llm.tokenizer.size:
                raise InputError(
                    f"{where}: token id {top} is not in the vocabulary of {llm.config.target}, ids "
                    f"are 0 to {llm.tokenizer.size - 1}; give the --target of both runs"
                )
        length = len(requests[pair.prompt_index].prompt_ids) + len(pair.common)
        if pair.kind != "identical" and length >= llm.context:
            raise InputError(
                f"{where} has {length} tokens before its texts part, the context is {llm.context}; "
                "raise --context to that of both runs"
            )


def _draws_differ(params: SamplingParams, verify: str) -> bool:
    """Whether different modes lawfully give different texts."""
    return params.temperature > 0 and verify == "ratio"
