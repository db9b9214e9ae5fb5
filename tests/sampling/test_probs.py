"""The sampling law against a slow, obvious implementation."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.reference import slow_probs
from tests.sampling.rows import greedy_and_sampled as sample
from tests.sampling.rows import probs, repeated, rows

CASES = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.7},
]


def _logits(count, vocab=1000):
    return np.random.default_rng(0).normal(0, 3, (count, vocab)).astype(np.float32)


def test_probs_equals_the_slow_law_row_by_row_in_one_batch():
    logits = _logits(len(CASES))
    got = probs(logits, rows(*CASES), jnp.zeros(len(CASES), jnp.int32), 1000)
    for row, case in enumerate(CASES):
        expected = slow_probs(logits[row], **case)
        np.testing.assert_array_equal(np.asarray(got[row]) > 0, expected > 0, err_msg=str(case))
        np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=1e-7, err_msg=str(case))


def test_filters_act_in_order_each_on_the_renormalised_result():
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    p = probs(logits, rows({"top_k": 3, "top_p": 0.75}), jnp.array([0]), 4)
    # After top-k: 4/9, 3/9, 2/9. 4/9 + 3/9 = 0.78 reaches 0.75, so two tokens stay; top-p alone
    # would have kept three.
    np.testing.assert_allclose(p[0], [4 / 7, 3 / 7, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("case", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 1}])
def test_ties_at_the_threshold_are_all_kept(case):
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    if case == {"top_k": 1}:
        logits = np.zeros((1, 4), np.float32)
    p = probs(logits, rows(case), jnp.array([0]), 4)
    assert (np.asarray(p[0]) > 0).all()


@pytest.mark.parametrize(
    "case",
    [{"temperature": 1e-6}, {"temperature": 1e6}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1}],
)
def test_the_law_is_a_distribution_at_every_extreme(case):
    logits = _logits(50, 37) * 30
    p = np.asarray(probs(logits, rows(*[case] * 50), jnp.zeros(50, jnp.int32), 37))
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-5)
    assert (p[np.arange(50), logits.argmax(axis=1)] > 0).all()


def test_padding_ids_get_probability_zero():
    logits = np.array([[0.0, 1.0, 50.0, 60.0]], np.float32)
    p = probs(logits, rows({}), jnp.array([0]), 2)
    assert p[0, 2] == p[0, 3] == 0
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)
    assert int(jnp.argmax(probs(logits, rows({"temperature": 0.0}), jnp.array([0]), 2))) == 1


def test_banned_ids_are_impossible_before_their_position_only():
    logits = np.array([[0.0, 9.0, 5.0]] * 2, np.float32)
    settings = rows(*[{"temperature": 0.0, "banned": (1, -1), "ban_before": 10}] * 2)
    p = probs(logits, settings, jnp.array([9, 10]), 3)
    assert p.argmax(axis=1).tolist() == [2, 1]


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.array([[1.0, 3.0, 3.0]], np.float32)
    assert sample(logits, rows({"temperature": 0.0}), jnp.array([0]), tokens=3).tolist() == [1]


def test_mixed_greedy_and_sampled_rows_do_not_disturb_each_other():
    """No sentinel temperature: a greedy row beside sampled ones is argmax at every seed."""
    logits = _logits(2, 500)
    for seed in range(50):
        settings = rows({"temperature": 0.0}, {"temperature": 1.0, "seed": (seed, 0)})
        assert int(sample(logits, settings, jnp.array([seed, seed]), tokens=500)[0]) == int(
            logits[0].argmax()
        )


def test_a_draw_depends_on_its_row_alone():
    logits = _logits(3, 500)
    settings = [{"seed": (row, 0), "request": row} for row in range(3)]
    start = jnp.array([4, 5, 6])
    together = sample(logits, rows(*settings), start, tokens=500)
    for row in range(3):
        alone = sample(logits[row : row + 1], rows(settings[row]), start[row : row + 1], tokens=500)
        assert alone.tolist() == [together[row]]


def test_draws_follow_the_law():
    """20,000 draws at successive positions."""
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    n = 20_000
    settings = rows({"temperature": 1.0})
    settings = repeated(settings, n)
    draws = sample(jnp.tile(logits, (n, 1)), settings, jnp.arange(n, dtype=jnp.int32), tokens=5)
    observed = np.bincount(np.asarray(draws), minlength=5)
    law = np.exp(logits.astype(np.float64))
    assert p_value(observed, law) > ALPHA
    assert p_value(observed, np.roll(law, 1)) <= ALPHA
