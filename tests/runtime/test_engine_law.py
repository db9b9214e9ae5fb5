"""Whole runs of the engine follow the law of the model: thousands of short texts are counted.

The law is worked out from the model's own logits, teacher-forced over every text that the
truncation leaves possible, with the slow reference. Greedy requests in the same batches say what
plain decoding says.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ssd_jax import LLM, SamplingParams
from ssd_jax.runtime.engine import Engine
from ssd_jax.text.detokenizer import Detokenizer
from tests import tiny
from tests.models.golden import our_logits
from tests.speculation.evidence import ALPHA, p_value
from tests.speculation.reference import next_law

COUNT = 3  # tokens of a text that are compared; one more is asked for, so that L is 2 at first
LETTERS = (97, 98, 99)
# The bias leaves three letters, so that counts are large, and the prompt has all their pairs, so
# that n-grams always match. Frequency penalties tell tokens in flight from tokens that are not.
COMMON: dict = {"temperature": 0.9, "logit_bias": dict.fromkeys(LETTERS, 30.0)}
SAMPLED: dict[str, dict] = {
    "top-k": COMMON | {"top_k": 3},
    "top-p, frequency": COMMON | {"top_p": 0.9, "frequency_penalty": 0.8},
}
GREEDILY: dict = COMMON | {"temperature": 0.0}
EACH = 600
GREEDY = 40
PROMPT = list(b"aabacbbcca")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("law")
    return [
        tiny.write_checkpoint(root / f"noise-{noise}", "qwen3", noise=noise) for noise in (0, 0.1)
    ]


@pytest.fixture(scope="module")
def laws(checkpoints):
    """Texts and their probabilities under each setting."""
    return {name: text_law(checkpoints[0], settings) for name, settings in SAMPLED.items()}


def as_rows(settings):
    """The settings as the slow reference takes them."""
    bias = settings["logit_bias"]
    return settings | {"bias_ids": tuple(bias), "bias": tuple(bias.values())}


def text_law(path, settings):
    law = {(): 1.0}
    for _ in range(COUNT):
        texts = np.array([[*PROMPT, *text] for text in law])
        logits = our_logits(path, texts)[:, -1, : tiny.TOKENS]
        longer = {}
        for (text, probability), row in zip(law.items(), logits, strict=True):
            following = next_law(row, as_rows(settings), PROMPT, text)
            for token in np.flatnonzero(following):
                longer[*text, int(token)] = probability * following[token]
        law = longer
    return law


def test_the_laws_are_laws_that_counts_can_tell_apart(laws):
    for law in laws.values():
        assert sum(law.values()) == pytest.approx(1)
        assert {token for text in law for token in text} == set(LETTERS)
        assert max(law.values()) < 0.6


def requests(llm):
    """Shuffled, so that settings meet each other in the slots."""
    settings = [*SAMPLED.values()] * EACH + [GREEDILY] * GREEDY
    asked = [
        llm.request(
            PROMPT,
            SamplingParams(max_tokens=COUNT + 1, ignore_eos=True, seed=11, **chosen),
            index,
        )
        for index, chosen in enumerate(settings)
    ]
    return [asked[place] for place in np.random.default_rng(0).permutation(len(asked))]


def counted(law, texts):
    """How often each text of a law came, others in the last cell; and the law, for `p_value`."""
    places = {text: place for place, text in enumerate(law)}
    cells = [places.get(tuple(text[:COUNT]), len(places)) for text in texts]
    return np.bincount(cells, minlength=len(places) + 1), np.array([*law.values(), 0.0])


def p_values(laws, outputs):
    """Of the outputs by request index."""
    each = {
        name: [outputs[index] for index in range(place, 2 * EACH, 2)]
        for place, name in enumerate(SAMPLED)
    }
    return {name: p_value(*counted(laws[name], texts)) for name, texts in each.items()}


def run(engine, asked):
    """Token ids of every request by its index, and the sum of accepted and proposed tokens."""
    for request in asked:
        engine.add(request)
    outputs, figures = {}, []
    while engine.has_work:
        for event in engine.step():
            if event.output is not None:
                outputs[event.prompt_index] = event.output.token_ids
                figures.append(event.output.metrics["acceptance_histogram"])
    return outputs, figures


def open_llm(checkpoints, drafter, **settings):
    target, draft = checkpoints
    return LLM(
        str(target),
        mode="sd",
        draft="ngram" if drafter == "ngram" else str(draft),
        dtype="float32",
        slots=4,
        k="2",
        context=32,
        compile_cache="off",
        **settings,
    )


CASES = {
    "sparse draft": ("model", {"proposal_support": "2"}),
    "whole draft": ("model", {"proposal_support": "full"}),
    "ngram": ("ngram", {}),
}


@pytest.fixture(scope="module")
def sparse(checkpoints):
    drafter, settings = CASES["sparse draft"]
    return open_llm(checkpoints, drafter, **settings)


@pytest.mark.parametrize("case", CASES)
def test_texts_follow_the_law_and_greedy_rows_are_plain_decoding(checkpoints, laws, sparse, case):
    drafter, settings = CASES[case]
    llm = sparse if case == "sparse draft" else open_llm(checkpoints, drafter, **settings)
    outputs, histograms = run(llm.engine, requests(llm))
    assert len(outputs) == 2 * EACH + GREEDY
    params = SamplingParams(max_tokens=COUNT + 1, ignore_eos=True, **GREEDILY)
    (plain,) = llm.generate([PROMPT], params, mode="ar")
    greedy = {tuple(outputs[2 * EACH + index]) for index in range(GREEDY)}
    assert greedy == {tuple(plain.token_ids)}
    values = p_values(laws, outputs)
    assert min(values.values()) > ALPHA
    rounds = np.sum([np.pad(shape, (0, 4))[:4] for shape in histograms if shape], axis=0)
    assert (rounds[1:3] > 0).all() if drafter == "model" else rounds[1] > 0


class AnotherQ:
    """A drafter that draws from q and ships it with the probabilities of its ids mixed up."""

    def __init__(self, drafter):
        self._drafter = drafter
        self.traits, self.k = drafter.traits, drafter.k
        self.open, self.prefill = drafter.open, drafter.prefill

    def propose(self, rows):
        drafted = self._drafter.propose(rows)
        q = np.asarray(drafted.proposal.q)
        both = np.all(q > 0, axis=-1, keepdims=True)
        mixed_up = drafted.proposal._replace(q=np.where(both, q[..., ::-1], q))
        return dataclasses.replace(drafted, proposal=mixed_up)


def test_a_draft_that_ships_another_q_is_caught(laws, sparse):
    roles = sparse.loaded.roles("sd", sparse.config.speculated)
    engine = Engine(
        roles.target,
        lambda: Detokenizer(sparse.tokenizer),
        sparse.tokenizer.eos_ids,
        drafter=AnotherQ(roles.drafter),
    )
    outputs, _ = run(engine, requests(sparse))
    values = p_values(laws, outputs)
    assert min(values.values()) <= ALPHA
