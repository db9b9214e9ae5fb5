"""Thresholds by the handler for processors: the largest ones that keep enough, ties included."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.kernels import handlers
from ssd_jax.kernels.verify import cpu
from tests.kernels.edited import use_edited

pytestmark = pytest.mark.skipif(handlers.why_missing() is not None, reason="no C++ compiler")

SIZES = (1, 16, 17, 257, 1000, 5001)


def law(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Probabilities [V]."""
    logits = rng.normal(0, 3, size)
    if kind == "sharp":
        logits[rng.integers(0, size, 3)] += 25
    elif kind == "steps":
        logits = np.round(logits)
    elif kind == "equal":
        logits[:] = 0
    elif kind == "zeros":
        logits[rng.permutation(size)[: size // 2]] = -np.inf
    p = np.exp(logits - logits.max())
    return (p / p.sum()).astype(np.float32)


def expected(p: np.ndarray, least: float, count: bool) -> float:
    """By sorting."""
    ordered = np.sort(p)[::-1].astype(np.float64)
    reached = np.cumsum(ordered > 0 if count else ordered) >= least
    return float(ordered[reached.argmax()]) if reached.any() else 0.0


def check(kind: str, size: int, seed: int, share: float, count: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = np.stack([law(kind, size, rng) for _ in range(3)])
    least = np.float32([share, 1.0, 0.999])
    if count:
        least = np.float32([max(1, round(share * size)), size, size + 1])
    found = np.asarray(cpu.thresholds(rows, least[:, None], count=count))[:, 0]
    for row, one, threshold in zip(rows, least, found, strict=True):
        # Sums in another order may reach a share at the next value.
        nearby = {expected(row, float(one) * (1 + error), count) for error in (-1e-12, 0, 1e-12)}
        assert threshold in nearby


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["broad", "sharp", "steps", "equal", "zeros"]),
    st.sampled_from(SIZES),
    st.integers(0, 10**6),
    st.floats(0.01, 0.999),
    st.booleans(),
)
def test_a_threshold_is_the_largest_that_keeps_enough(kind, size, seed, share, count):
    check(kind, size, seed, share, count)


@pytest.mark.parametrize("count", [False, True])
def test_a_row_that_is_no_law_has_no_threshold(count):
    row = np.full((1, 600), np.nan, np.float32)
    assert cpu.thresholds(row, np.float32([[0.9]]), count=count).tolist() == [[0.0]]


def test_rows_whose_bound_is_wrong_are_searched_whole():
    """A law that does not sum to 1 reaches its share further down than the bound says."""
    row = np.concatenate([[0.25], np.full(999, 0.0005)]).astype(np.float32)[None]
    assert cpu.thresholds(row, np.float32([[0.7]]), count=False)[0, 0] == np.float32(0.0005)
    half = row / 1.07
    assert cpu.thresholds(half, np.float32([[0.69]]), count=False)[0, 0] == half[0, 1]


MUTANTS = {
    "one too many": ("if (above >= least_) return value;", "if (above > least_) return value;"),
    "a bound that decides": ("if (threshold >= bound) return", "if (threshold >= 0) return"),
    "a bucket's values not looked at": (
        "if (inside > 0 && above + inside >= least_) return Inside(bound, bucket, above);",
        "if (inside > 0 && above + inside >= least_) return Inside(bound, bucket, least_);",
    ),
}


@pytest.fixture
def use(tmp_path, monkeypatch):
    """Has calls take the handler of a source in which one text is another."""

    def mutate(old: str, new: str) -> None:
        calls = {(cpu, "THRESHOLDS"): "ssd_jax_thresholds"}
        use_edited(monkeypatch, tmp_path, "verify/cpu.cc", (old, new), calls)
        jax.clear_caches()

    yield mutate
    jax.clear_caches()


def search_everywhere():
    for seed, kind in enumerate(["broad", "sharp", "steps", "equal", "zeros"] * 6):
        check(kind, 1000, seed, 0.1 + 0.025 * seed, count=seed % 2 == 1)
    zeros = np.zeros((1, 600), np.float32)
    zeros[0, [3, 500]] = [0.75, 0.25]
    assert cpu.thresholds(zeros, np.float32([[0.8]]), count=False)[0, 0] == np.float32(0.25)
    assert cpu.thresholds(zeros, np.float32([[0.75]]), count=False)[0, 0] == np.float32(0.75)
    zeros[0, [3, 500]] = [0.25, 0.25 + 2.0**-11]  # of one bucket
    assert cpu.thresholds(zeros, zeros[:, 500:501], count=False)[0, 0] == zeros[0, 500]
    row = np.concatenate([[0.25], np.full(999, 0.0002)]).astype(np.float32)[None]
    assert cpu.thresholds(row, np.float32([[0.44]]), count=False)[0, 0] == np.float32(0.0002)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, use):
    search_everywhere()
    use(*MUTANTS[name])
    with pytest.raises(AssertionError):
        search_everywhere()
