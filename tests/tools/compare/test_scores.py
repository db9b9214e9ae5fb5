"""Scores at a fork are those that the engine chooses by."""

import math

import numpy as np
import pytest

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from ssd_jax.tools.compare.judges import LIMITS, ModelJudge
from ssd_jax.tools.compare.pairs import Output
from ssd_jax.tools.compare.scores import ForkScorer
from tests.tools.compare.builders import generation, pair

LONG = "The quick brown fox jumps over the lazy dog. " * 4
SETTINGS = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
    {"min_tokens": 12, "logit_bias": {tiny.EOS: 50.0, 65: 2.0}},
    {"logit_bias": {65: 40.0, 66: 39.0, 67: 38.0}, "bad_words": ["bb", "bc"]},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.4, "top_k": 5, "seed": 2**63 + 1},
    {"temperature": 1.2, "top_p": 0.7, "min_p": 0.02, "presence_penalty": 0.5},
]


SAME = {
    "dtype": "float32",
    "exact": "distribution",
    "verify": "coupled",
    "context": 320,
    "compile_cache": "off",
}


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return LLM(str(tiny_checkpoint), **SAME)


@pytest.fixture(scope="module")
def scorer(llm):
    return ForkScorer(llm, LIMITS["float32"])


def answers(llm, mode, max_tokens=16):
    requests = [
        llm.request(
            LONG if index % 2 else "a", SamplingParams(max_tokens=max_tokens, **more), index
        )
        for index, more in enumerate(SETTINGS)
    ]
    found = {e.prompt_index: e.output for e in llm.run(requests, mode) if e.output is not None}
    return requests, [Output.of(found[request.index]) for request in requests]


@pytest.mark.more
def test_the_engines_token_has_the_best_score_at_every_position(llm, scorer):
    for request, output in zip(*answers(llm, "ar"), strict=True):
        for place, token in enumerate(output.token_ids):
            seen = scorer.scores(request, output.token_ids[:place], token, (token + 1) % 256)
            assert seen.best - 1e-3 < seen.a.score <= seen.best + 1e-3, (request.params, place)
            assert seen.a.may_stay
            assert seen.b.score < seen.a.score


def test_a_greedy_margin_is_the_difference_of_logits(llm, scorer):
    """Against log-probabilities, which the engine reports by another way."""
    found = llm.generate("a", SamplingParams(max_tokens=8, logprobs=9), mode="ar")[0]
    assert found.logprobs is not None
    request = llm.request("a")
    for place, entry in enumerate(found.logprobs):
        drawable = [(token, value) for token, value in entry.top if token < tiny.TOKENS]
        (best, high), (second, low), *_ = drawable  # raw ones know no vocabulary padding
        scores = scorer.scores(request, found.token_ids[:place], best, second)
        np.testing.assert_allclose(scores.margin, high - low, atol=1e-4)


def test_banned_and_truncated_tokens_may_not_stay(llm, scorer):
    banned = llm.request("a", SamplingParams(min_tokens=3, max_tokens=9))
    assert not scorer.scores(banned, (65, 66), tiny.EOS, 65).a.may_stay
    assert scorer.scores(banned, (65, 66, 67), tiny.EOS, 65).a.may_stay
    assert not scorer.scores(banned, (65,), tiny.TOKENS, 65).a.may_stay  # vocabulary padding
    one = llm.request("a", SamplingParams(temperature=1.0, top_k=1))
    best = llm.generate("a", SamplingParams(max_tokens=1), mode="ar")[0].token_ids[0]
    seen = scorer.scores(one, (), best, (best + 1) % 256)
    assert (seen.a.may_stay, seen.a.may_go) == (True, False)
    assert (seen.b.may_stay, seen.b.may_go) == (False, True)


@pytest.mark.parametrize("filtered", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.9}])
def test_rounding_decides_at_the_edge_of_a_filter(llm, filtered):
    """Two tokens with nearly all the mass, the second just below what the filter keeps."""
    bias = {65: 20.0, 66: 20.0}
    even = ForkScorer(llm, 1e-3).scores(
        llm.request("a", SamplingParams(logit_bias=bias)), (), 65, 66
    )
    bias[65] += even.b.score - even.a.score
    bias[66] += math.log(filtered.get("min_p", 1.0)) - 1e-4
    request = llm.request("a", SamplingParams(temperature=1.0, logit_bias=bias, **filtered))
    edge = ForkScorer(llm, 1e-3).scores(request, (), 65, 66)
    assert (edge.b.may_stay, edge.b.may_go) == (True, True)
    exact = ForkScorer(llm, 1e-6).scores(request, (), 65, 66)
    assert (exact.b.may_stay, exact.b.may_go) == (False, True)


@pytest.mark.slow
def test_modes_are_identical_or_part_within_rounding(tiny_checkpoint, tmp_path):
    draft = tiny.write_checkpoint(tmp_path / "llama", noise=0.04)
    llm = LLM(str(tiny_checkpoint), mode="sd", draft=str(draft), k="3", **SAME)
    requests, alone = answers(llm, "ar", max_tokens=40)
    _, together = answers(llm, "sd", max_tokens=40)
    judge = ModelJudge(llm, {request.index: request for request in requests}, certain=True)
    for request, a, b in zip(requests, together, alone, strict=True):
        found = pair(a, b, request.index)
        if found.kind != "identical":
            finding = judge(found)
            assert finding.verdict == "float", request.params
            assert finding.margin is not None
            assert finding.margin < 1e-3


def test_a_forged_token_is_found_by_law_at_its_place(llm):
    requests, alone = answers(llm, "ar")
    judge = ModelJudge(llm, {request.index: request for request in requests}, certain=True)
    for request, output in zip(requests, alone, strict=True):
        for place in (0, len(output.token_ids) - 1):
            ids = list(output.token_ids)
            ids[place] = (ids[place] + 1) % 256
            found = pair(output, generation(*ids, index=request.index), request.index)
            finding = judge(found)
            assert (found.position, finding.verdict) == (place, "wrong")
            assert finding.margin is not None
            assert finding.margin > 1e-3
            assert finding.texts == tuple(
                llm.tokenizer.decode([token], skip_special_tokens=False) for token in found.tokens
            )


def test_a_near_tie_is_a_difference_of_rounding(llm, scorer):
    request, first = llm.request("a"), llm.generate("a", SamplingParams(max_tokens=1), mode="ar")
    best = first[0].token_ids[0]
    other = (best + 1) % 256
    gap = scorer.scores(request, (), best, other).margin
    for below, verdict in ((5e-4, "float"), (5e-3, "wrong")):
        biased = llm.request("a", SamplingParams(logit_bias={other: gap - below}))
        finding = ModelJudge(llm, {0: biased}, certain=True)(
            pair(generation(best), generation(other))
        )
        assert finding.verdict == verdict
        assert finding.margin == pytest.approx(below, abs=2e-5)


def test_ends_are_by_law_where_the_settings_are_the_same(llm):
    request, ends = llm.request("a"), pair(generation(65), generation(65, 66))
    assert ModelJudge(llm, {0: request}, certain=True)(ends).verdict == "wrong"
    assert ModelJudge(llm, {0: request}, certain=False)(ends).verdict == "unknown"


def test_ratio_sampled_texts_are_draws_of_one_law(llm, tiny_checkpoint):
    ratio = LLM(str(tiny_checkpoint), dtype="float32", compile_cache="off", load=False)
    hot = llm.request("a", SamplingParams(temperature=1.0))
    fork = pair(generation(65), generation(66))
    assert ModelJudge(ratio, {0: hot}, certain=True)(fork).verdict == "sampled"
    assert ModelJudge(llm, {0: hot}, certain=True)(fork).verdict == "wrong"  # coupled
