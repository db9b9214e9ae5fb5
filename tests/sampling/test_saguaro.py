"""Lowering q where branches are prepared."""

import jax
import numpy as np
import pytest

from ssd_jax.sampling import saguaro
from tests.sampling.rows import QUICKLY

lower = jax.jit(saguaro.lower, compiler_options=QUICKLY)
N, W, VOCAB = 6, 4, 30


def laws(rows: int, seed: int = 0):
    """q [B, N] with zeros in places, its ids, and candidates, likeliest first, some none."""
    rng = np.random.default_rng(seed)
    q = rng.gamma(1.0, 1.0, (rows, N)) * (rng.random((rows, N)) < 0.7)
    q[:, 0] += 0.1
    q = -np.sort(-q, axis=1)
    q = (q / q.sum(1, keepdims=True)).astype(np.float32)
    ids = rng.permuted(np.tile(np.arange(VOCAB), (rows, 1)), axis=1)
    # Filters come between the two: a candidate may be outside the support, or the other way round.
    shift = rng.integers(0, 3, rows)
    candidates = np.stack([row[at : at + W] for row, at in zip(ids, shift, strict=True)])
    candidates[rng.random(rows) < 0.2, 2:] = -1
    return q, ids[:, :N].astype(np.int32), candidates.astype(np.int32)


def slow(q, ids, candidates, count, c):
    """One row, as the paper has it."""
    chosen = {token for token in candidates[:count].tolist() if token >= 0}
    weights = [c * p if token in chosen else p for p, token in zip(q, ids, strict=True)]
    if not any(p > 0 and token not in chosen for p, token in zip(q, ids, strict=True)):
        return q
    return np.array(weights) / sum(weights)


@pytest.mark.parametrize("c", [0.0, 0.3, 1.0])
def test_the_first_d_candidates_are_multiplied_by_c_and_the_rest_renormalised(c):
    q, ids, candidates = laws(400)
    d = np.random.default_rng(1).integers(0, W + 1, 400).astype(np.int32)
    found = np.asarray(lower(q, ids, candidates, d, c))
    changed = 0
    for row in range(400):
        expected = slow(q[row].astype(np.float64), ids[row], candidates[row], d[row], c)
        np.testing.assert_allclose(found[row], expected, rtol=1e-5, atol=1e-7)
        changed += not np.allclose(expected, q[row])
    assert (changed > 150) == (c < 1)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    assert found.dtype == np.float32


def test_one_count_may_hold_for_all_rows():
    q, ids, candidates = laws(50)
    np.testing.assert_array_equal(
        lower(q, ids, candidates, np.int32(2), 0.5),
        lower(q, ids, candidates, np.full(50, 2, np.int32), 0.5),
    )


@pytest.mark.parametrize("c", [0.0, 0.5])
def test_a_set_that_covers_the_support_changes_no_bit(c):
    """With C = 0 nothing would be left to draw from."""
    q = np.array([[0.7, 0.3, 0, 0], [0.7, 0.2, 0.1, 0], [1, 0, 0, 0]], np.float32)
    ids = np.tile(np.arange(4, dtype=np.int32), (3, 1))
    candidates = np.array([[1, 0, 3]] * 3, np.int32)
    found = np.asarray(lower(q, ids, candidates, np.int32(2), c))
    np.testing.assert_array_equal(found[[0, 2]], q[[0, 2]])
    np.testing.assert_allclose(found[1], np.array([0.7 * c, 0.2 * c, 0.1, 0]) / (0.9 * c + 0.1))


def test_padding_is_no_token():
    """Neither ids nor candidates of -1 are tokens that could be the same."""
    q = np.array([[0.6, 0.4, 0]], np.float32)
    ids = np.array([[3, 5, -1]], np.int32)
    nothing = np.full((1, W), -1, np.int32)
    np.testing.assert_allclose(lower(q, ids, nothing, np.int32(W), 0.0), q, rtol=1e-6)
    np.testing.assert_allclose(
        lower(q, ids, np.array([[3, -1]], np.int32), np.int32(2), 0.0), [[0, 1, 0]]
    )
