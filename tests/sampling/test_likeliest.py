"""The law over the likeliest tokens alone, against the full law."""

import jax
import numpy as np
import pytest

from ssd_jax.sampling import probs
from tests.sampling.reference import slow_probs
from tests.sampling.rows import QUICKLY, rows

COUNT = 16
CASES = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.02},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": COUNT},
    {"top_k": 500},  # wants more than are there
    {"top_p": 0.05},
    {"top_p": 0.5},
    {"temperature": 3.0, "top_p": 0.6},  # wants more than are there
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1e-6},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 6, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.4, "min_p": 0.5},
    {"temperature": 3.0, "top_k": COUNT, "top_p": 0.6},
]

likeliest = jax.jit(probs.likeliest_probs, static_argnums=1, compiler_options=QUICKLY)


def logits(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (len(CASES), size)).astype(np.float32)


def assert_truncated(p, ids, law):
    """p is the law of these ids, renormalised."""
    expected = law[ids] / law[ids].sum()
    np.testing.assert_array_equal(p > 1e-30, expected > 1e-30)
    np.testing.assert_allclose(p, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("size", [COUNT, 1000, 5001])
def test_the_law_of_the_likeliest_is_the_full_law_renormalised(size):
    """For each row its own filters, whether they end within the likeliest tokens or beyond."""
    x = logits(size)
    p, ids = map(np.asarray, likeliest(x, COUNT, rows(*CASES)))
    beyond = 0
    for row, case in enumerate(CASES):
        np.testing.assert_array_equal(ids[row], np.argsort(-x[row], kind="stable")[:COUNT])
        law = slow_probs(x[row], **case)
        assert_truncated(p[row], ids[row], law)
        beyond += np.count_nonzero(law) > COUNT
    assert p.dtype == np.float32
    assert (beyond > 5) == (size > COUNT)


def test_a_top_k_beyond_them_does_not_enter_what_top_p_keeps():
    """Top-p looks at shares of all tokens then; it may keep more than after a full top-k."""
    x = logits(1000)[:2] / 4
    settings = {"top_k": 40, "top_p": 0.1}
    p, ids = map(np.asarray, likeliest(x, COUNT, rows(settings, settings)))
    for row in range(2):
        law = slow_probs(x[row], top_p=settings["top_p"])
        assert_truncated(p[row], ids[row], law)
        assert 0 < np.count_nonzero(slow_probs(x[row], **settings)) < np.count_nonzero(p[row])


def test_forbidden_tokens_have_no_share_and_greedy_rows_get_temperature_one():
    x = logits(300)[:2]
    x[:, 10:] = -np.inf
    p, ids = map(np.asarray, likeliest(x, COUNT, rows({"temperature": 0.0}, {})))
    for row in range(2):
        assert_truncated(p[row], ids[row], slow_probs(x[row]))
        assert np.count_nonzero(p[row]) == 10


def test_ties_at_a_threshold_are_all_kept():
    x = np.log(np.array([[0.4, 0.15, 0.15, 0.15, 0.05, 0.05, 0.05]] * 3, np.float32))
    settings = rows({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.37})
    p, _ = map(np.asarray, likeliest(x, 5, settings))
    assert (p > 0).tolist() == [[True] * 4 + [False]] * 3
