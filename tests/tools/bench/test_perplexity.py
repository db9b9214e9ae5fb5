from __future__ import annotations

import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from ssd_jax.tools.bench import perplexity
from ssd_jax.tools.bench.perplexity import Perplexity, TextScorer, measure_perplexity
from tests.models.golden import FLOAT32, Runner, parameters


def table_score(window: np.ndarray) -> np.ndarray:
    """A model of two tokens: each repeats with probability 3/4."""
    return np.log(np.where(window[1:] == window[:-1], 0.75, 0.25))


def test_a_known_table_has_the_perplexity_computed_by_hand():
    # Windows 0 0 0 and 1 0 1: two repeats, two changes; the step from one to the other is no pair.
    result = measure_perplexity(table_score, [0, 0, 0, 1, 0, 1], window=3)
    assert result.value == pytest.approx((4 / 3 * 4 / 3 * 4 * 4) ** (1 / 4))
    assert result.nats == pytest.approx((math.log(4 / 3), math.log(4)))
    assert result.num_predicted == 4


def test_windows_do_not_overlap_and_the_rest_is_not_used():
    seen = []

    def score(window):
        seen.append(window.tolist())
        return np.zeros(3)

    result = measure_perplexity(score, range(11), window=4)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (result.num_predicted, result.tokens, result.value) == (6, 11, 1)
    measure_perplexity(score, range(11), window=4, windows=1)
    assert seen[2:] == [[0, 1, 2, 3]]


def test_a_token_without_probability_makes_the_perplexity_infinite():
    result = measure_perplexity(lambda window: np.array([-np.inf]), [0, 1], window=2)
    assert result.value == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 7}, "the text has 6 tokens, window = 7"),
    ],
)
def test_windows_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        measure_perplexity(table_score, [0] * 6, **options)


def model(execution: Execution = FLOAT32) -> FunctionalModel:
    return FunctionalModel(ModelConfig.from_hf(tiny.config("llama")), execution)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_uniform_model_has_as_much_perplexity_as_the_vocabulary_has_tokens(dtype):
    """Weights of zero; rows of the embedding beyond the vocabulary are padding."""
    uniform = model(Execution.for_platform("cpu", dtype))
    zeros = [jnp.zeros(struct.shape, struct.dtype) for struct in uniform.parameter_structs()]
    score = TextScorer(uniform, zeros, window=200, tokens=tiny.TOKENS)
    text = np.random.default_rng(0).integers(0, tiny.TOKENS, 400)
    result = measure_perplexity(score, text.tolist(), window=200)
    assert result.value == pytest.approx(tiny.TOKENS, rel=1e-5)


@pytest.mark.parametrize(
    "window",
    [pytest.param(40, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow), 300],
)
def test_scores_are_the_log_probabilities_of_a_whole_forward(window, tiny_checkpoint):
    """Windows shorter than a chunk, as long, and longer; twice, since pages are used again."""
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    tiny_model = FunctionalModel(checkpoint.config, FLOAT32)
    weights = parameters(checkpoint, tiny_model)
    score = TextScorer(tiny_model, weights, window=window, tokens=tiny.TOKENS)
    for seed in range(2):
        tokens = np.random.default_rng(seed).integers(0, tiny.TOKENS, window).astype(np.int32)
        logits = Runner(tiny_model, weights, slots=1, context=window)(tokens[None])[0]
        chances = jax.nn.log_softmax(logits[:-1, : tiny.TOKENS], axis=1)
        expected = np.take_along_axis(np.asarray(chances), tokens[1:, None], axis=1)[:, 0]
        np.testing.assert_allclose(score(tokens), expected, atol=2e-4)


@pytest.mark.more
def test_groups_of_devices_that_share_slots_score_alike(tiny_checkpoint):
    checkpoint = open_checkpoint(str(tiny_checkpoint))
    tokens = np.random.default_rng(0).integers(0, tiny.TOKENS, 40).astype(np.int32)
    found = []
    for mesh in (None, mesh_of(jax.devices()[:4], data=2)):
        unsharded = FunctionalModel(checkpoint.config, FLOAT32, mesh=mesh)
        score = TextScorer(
            unsharded, parameters(checkpoint, unsharded), window=40, tokens=tiny.TOKENS
        )
        found.append(score(tokens))
    np.testing.assert_allclose(*found, atol=2e-5)


def test_the_table_says_what_was_predicted():
    result = Perplexity(window=3, nats=(math.log(2), math.log(8)), tokens=7)
    page = io.StringIO()
    console = Console(width=100, file=page, color_system=None)
    console.print(perplexity.perplexity_table(result, dtype="int8"))
    text = page.getvalue()
    assert "4.000" in text
    assert "int8" in text
    assert "7 tokens in the text" in text
    assert (result.value, result.num_predicted) == (pytest.approx(4), 4)
