"""Scores are the target's own law at temperature 1, position by position."""

import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.scoring import load_scorer
from ssd_jax.tools.distill.settings import TargetSettings
from ssd_jax.tools.distill.shards import Sample
from tests.models.golden import FLOAT32, Runner, parameters

TOP = 6
LENGTHS = (3, 40, 17, 190, 120, 1, 64, 129)  # of one to three chunks, one or two pages
PROMPTS = (1, 12, 0, 60, 30, 0, 64, 128)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    return [
        Sample(tokens=rng.integers(0, tiny.TOKENS, n).astype(np.int32), prompt_length=prompt)
        for n, prompt in zip(LENGTHS, PROMPTS, strict=True)
    ]


@pytest.fixture(scope="module")
def laws(tiny_checkpoint, samples):
    """The engine's law at every learnt position, computed in float64 from its logits."""
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    model = FunctionalModel(checkpoint.config, FLOAT32)
    longest = max(LENGTHS)
    tokens = np.stack(
        [np.pad(sample.tokens, (0, longest - len(sample.tokens))) for sample in samples]
    )
    runner = Runner(model, parameters(checkpoint, model), slots=len(samples), context=longest)
    logits = runner(tokens)
    logits = logits[:, :, : tiny.TOKENS].astype(np.float64)  # the other rows are padding
    laws = np.exp(logits - logits.max(-1, keepdims=True))
    laws /= laws.sum(-1, keepdims=True)
    return np.concatenate([laws[i, list(sample.learnt)] for i, sample in enumerate(samples)])


def test_the_likeliest_tokens_and_their_probabilities_are_the_targets(
    tiny_checkpoint, samples, laws, monkeypatch
):
    monkeypatch.setattr(
        "ssd_jax.tools.distill.scoring._ROWS", 5
    )  # several batches, of several texts
    monkeypatch.setattr("ssd_jax.tools.distill.scoring._HEAD_ROWS", 50)
    target = TargetSettings(source=str(tiny_checkpoint), dtype="float32")
    ids, probs = load_scorer(target, longest=max(LENGTHS), top_n=TOP).run(samples)
    assert ids.shape == probs.shape == (len(laws), TOP)
    assert ids.max() < tiny.TOKENS
    np.testing.assert_allclose(probs, np.take_along_axis(laws, ids, axis=1), atol=2e-5)
    np.testing.assert_allclose(probs, -np.sort(-laws, axis=1)[:, :TOP], atol=2e-5)
