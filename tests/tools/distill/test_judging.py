"""A draft judged on given text: against plain sums, and where the answer is known.

That SD on the engine takes these rounds is in tests/llm/test_reduced_draft.py.
"""

import jax
import numpy as np
import pytest

from ssd_jax.devices.opening.models import open_model
from ssd_jax.models.sequence import sequence_hidden, sequence_logits
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.scoring import judge as judge_texts
from ssd_jax.tools.distill.shards import Sample
from tests.checkpoints import tiny_drafts

IDS = np.array([*range(1, 256, 2), tiny.EOS, tiny.END_OF_TURN, tiny.PAD])
LENGTH = 64


@pytest.fixture(scope="module")
def drafts(tiny_checkpoint, tmp_path_factory):
    """A reduced and noisy draft, and one that is the target again."""
    target = tiny_drafts.open_target(tiny_checkpoint)
    directory = tmp_path_factory.mktemp("drafts")
    return (
        tiny_drafts.write(directory / "noisy", target, IDS, noise=0.04, layers=2),
        tiny_drafts.write(directory / "same", target, None, layers=2),
    )


def models(target, draft):
    of_target = open_model(str(target), "float32")
    of_draft = open_model(str(draft), "float32", target=of_target.checkpoint)
    return (of_target.model, of_target.load()), (of_draft.model, of_draft.load())


@pytest.fixture(scope="module")
def noisy(tiny_checkpoint, drafts):
    return models(tiny_checkpoint, drafts[0])


class Law:
    """A model's probabilities [n, columns] float64 of a text in a row of its own."""

    def __init__(self, model, parameters):
        def logits(parameters, tokens):
            module = model.module(parameters)
            places = np.arange(LENGTH, dtype=np.int32)[None]
            hidden = sequence_hidden(module, tokens, places, np.ones_like(places))
            return sequence_logits(module, hidden[0])

        self._logits, self._parameters = jax.jit(logits), parameters

    def __call__(self, given):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(given)] = given
        found = np.asarray(self._logits(self._parameters, tokens), np.float64)
        found = found[: len(given), : tiny.TOKENS]  # behind them is padding
        found = np.exp(found - found.max(axis=-1, keepdims=True))
        return found / found.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def laws(noisy):
    return [Law(*one) for one in noisy]


@pytest.fixture(scope="module")
def texts(laws):
    """Greedy, and at random; several share a row, and there are two rows of 128."""
    rng = np.random.default_rng(0)
    made = []
    for prompt, size in ((3, 30), (9, 40), (1, 2)):
        tokens = rng.integers(0, 256, prompt).tolist()
        while len(tokens) < size:
            tokens.append(int(laws[0](tokens)[-1].argmax()))
        made.append(Sample(tokens=np.array(tokens, np.int32), prompt_length=prompt))
    for prompt, size in ((5, 60), (30, 31)):
        tokens = rng.integers(0, tiny.TOKENS, size).astype(np.int32)
        made.append(Sample(tokens=tokens, prompt_length=prompt))
    return made


def judge(pair, texts, monkeypatch):
    monkeypatch.setattr("ssd_jax.tools.distill.scoring._ROWS", 3)
    monkeypatch.setattr("ssd_jax.tools.distill.scoring._HEAD_ROWS", 50)
    return judge_texts(*pair, texts, tokens=tiny.TOKENS, longest=LENGTH)


def test_figures_are_the_sums_that_they_say(noisy, laws, texts, monkeypatch):
    outside = 0
    for text, found in zip(texts, judge(noisy, texts, monkeypatch), strict=True):
        p, columns = (law(text.tokens) for law in laws)
        q = np.zeros_like(p)
        q[:, IDS] = columns
        assert len(found.rank) == len(text.tokens) - text.prompt_length
        for place, token in enumerate(text.tokens[text.prompt_length :]):
            p_here, q_here = p[text.prompt_length + place - 1], q[text.prompt_length + place - 1]
            overlap = sum(min(a, b) for a, b in zip(p_here, q_here, strict=True))
            assert found.overlap[place] == pytest.approx(overlap, abs=1e-4)
            assert found.acceptance[place] == pytest.approx(
                min(1, q_here[token] / p_here[token]), abs=1e-3
            )
            known = token in IDS
            rank = sum(q_of > q_here[token] for q_of in q_here) if known else len(IDS)
            assert found.rank[place] == rank
            outside += not known
    assert outside


def test_a_draft_that_is_its_target_is_always_right(tiny_checkpoint, drafts, texts, monkeypatch):
    found = judge(models(tiny_checkpoint, drafts[1]), texts, monkeypatch)
    for one in found[:3]:
        assert (one.rank == 0).all()  # these are greedy
    for one in found:
        np.testing.assert_allclose(one.overlap, 1, atol=1e-4)
        np.testing.assert_allclose(one.acceptance, 1, atol=1e-3)


def test_of_equally_likely_ids_the_lowest_is_proposed(noisy, texts, monkeypatch):
    target, (draft, weights) = noisy
    flat = [np.zeros_like(array) for array in weights]
    (found,) = judge((target, (draft, flat)), texts[:1], monkeypatch)
    tokens = texts[0].tokens[texts[0].prompt_length :]
    expected = [IDS.tolist().index(t) if t in IDS else len(IDS) for t in tokens]
    assert found.rank.tolist() == expected
