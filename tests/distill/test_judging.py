"""A draft judged on the target's text: against plain sums, and against what SD really does."""

import jax
import numpy as np
import pytest

from ssd_jax.distill.judging import Judge, Text
from ssd_jax.distill.rounds import walk
from ssd_jax.llm import LLM
from ssd_jax.models.sequence import sequence_hidden, sequence_logits
from ssd_jax.opened import open_model
from ssd_jax.runtime.request import SamplingParams
from tests import tiny
from tests.weights import tiny_drafts

IDS = np.array([i for i in range(tiny.TOKENS) if i % 7 != 3])
K = 3


@pytest.fixture(scope="module")
def drafts(tiny_checkpoint, tmp_path_factory):
    """A reduced and noisy draft, and one that is the target again."""
    target = tiny_drafts.open_target(tiny_checkpoint)
    directory = tmp_path_factory.mktemp("drafts")
    return (
        tiny_drafts.write(directory / "noisy", target, IDS, noise=0.04, layers=2),
        tiny_drafts.write(directory / "same", target, None, layers=2),
    )


@pytest.fixture(scope="module")
def llm(tiny_checkpoint, drafts):
    return LLM(
        str(tiny_checkpoint),
        mode="sd",
        draft=str(drafts[0]),
        k=str(K),
        dtype="float32",
        slots=4,
        context=64,
        compile_cache="off",
    )


@pytest.fixture(scope="module")
def requests(llm):
    """Some are stopped by a token in the middle of what they would say, some by their length."""
    prompts = [[1 + i, 40, 7 * i % 250] * (1 + i % 3) for i in range(8)]
    free = llm.generate(prompts, SamplingParams(max_tokens=40), mode="ar")
    made = []
    for place, (prompt, output) in enumerate(zip(prompts, free, strict=True)):
        stops = (output.token_ids[5 + 4 * place],) if place % 2 else ()
        params = SamplingParams(max_tokens=33 + place, stop_token_ids=stops)
        made.append(llm.request(prompt, params, place))
    return made


def run(llm, requests, mode):
    found = [event.output for event in llm.run(requests, mode) if event.output is not None]
    return sorted(found, key=lambda output: output.prompt_index)


@pytest.fixture(scope="module")
def texts(llm, requests):
    """The target's greedy text of each request."""
    outputs = run(llm, requests, "ar")
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    return [
        Text(np.array([*request.prompt_ids, *output.token_ids], np.int32), len(request.prompt_ids))
        for request, output in zip(requests, outputs, strict=True)
    ]


def models(target, draft):
    theirs = open_model(str(target), "float32")
    own = open_model(str(draft), "float32", target=theirs)
    return (theirs.model, theirs.load()), (own.model, own.load())


def judge_of(pair):
    return Judge(*pair, tokens=tiny.TOKENS, longest=64)


@pytest.fixture(scope="module")
def noisy(tiny_checkpoint, drafts):
    return models(tiny_checkpoint, drafts[0])


@pytest.fixture(scope="module")
def judged(noisy, texts):
    return judge_of(noisy).judge(texts)


def probabilities(model, parameters, text):
    """[n, columns] float64: a whole text in a row of its own, padded behind."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(text.tokens)] = text.tokens

    @jax.jit
    def logits(parameters, tokens):
        module = model.module(parameters)
        places = np.arange(64)[None]
        hidden = sequence_hidden(module, tokens, places, np.ones_like(places))
        return sequence_logits(module, hidden[0])

    found = np.asarray(logits(parameters, tokens), np.float64)[: len(text.tokens), : tiny.TOKENS]
    found = np.exp(found - found.max(axis=-1, keepdims=True))
    return found / found.sum(axis=-1, keepdims=True)


def test_figures_are_the_sums_that_they_say(noisy, texts, judged):
    (target, theirs), (draft, own) = noisy
    outside = 0
    for text, found in zip(texts[:2], judged, strict=False):
        p, columns = probabilities(target, theirs, text), probabilities(draft, own, text)
        q = np.zeros_like(p)
        q[:, IDS] = columns
        assert len(found.rank) == len(text.tokens) - text.prompt
        for place, token in enumerate(text.tokens[text.prompt :]):
            before = text.prompt + place - 1
            overlap = sum(min(a, b) for a, b in zip(p[before], q[before], strict=True))
            assert found.overlap[place] == pytest.approx(overlap, abs=1e-4)
            kept = min(1, q[before, token] / p[before, token])
            assert found.kept[place] == pytest.approx(kept, abs=1e-3)
            outside += token not in IDS
            rank = int((q[before] > q[before, token]).sum()) if token in IDS else len(IDS)
            assert found.rank[place] == rank
    assert outside


def test_rounds_are_those_of_sd_on_the_engine(llm, requests, texts, judged):
    greedy = [(one.rank == 0).astype(float) for one in judged]
    assert 0.2 < np.mean(np.concatenate(greedy)) < 0.9
    for place, output in enumerate(run(llm, requests, "sd")):
        text = texts[place]
        assert output.token_ids == text.tokens[text.prompt :].tolist()
        expected = walk(greedy[place : place + 1], K).tokens_per_call
        assert output.metrics["acceptance_length"] == pytest.approx(expected)


def test_a_draft_that_is_its_target_is_always_right(tiny_checkpoint, drafts, texts):
    for one in judge_of(models(tiny_checkpoint, drafts[1])).judge(texts):
        assert (one.rank == 0).all()
        np.testing.assert_allclose(one.overlap, 1, atol=1e-4)
        np.testing.assert_allclose(one.kept, 1, atol=1e-3)


def test_of_equally_likely_ids_the_lowest_is_proposed(noisy, texts):
    (target, theirs), (draft, own) = noisy
    flat = [np.zeros_like(array) for array in own]
    (found,) = judge_of(((target, theirs), (draft, flat))).judge(texts[:1])
    tokens = texts[0].tokens[texts[0].prompt :]
    expected = [IDS.tolist().index(t) if t in IDS else len(IDS) for t in tokens]
    assert found.rank.tolist() == expected
