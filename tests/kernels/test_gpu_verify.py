"""Verification by Pallas on a GPU."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.kernels.verify import api
from ssd_jax.sampling.variants import VARIANTS
from tests.kernels.verify_cases import KINDS, SETTINGS, arguments, as_trees, outcomes, verify

pytestmark = [pytest.mark.gpu, pytest.mark.shipped]

WIDTH, ROWS = 3, 4
TREE_WIDTH = 17
REAL = 128_256
SETTINGS_OF = {
    "greedy": ({"temperature": 0.0},),
    "sampled": ({}, {"temperature": 0.0}, {"temperature": 0.5}),
}
CHAINS = [
    *((vocab, "truncated", rule) for vocab in (300, 9001, REAL) for rule in ("ratio", "coupled")),
    *((vocab, "truncated", "ratio") for vocab in (49_152, 151_936)),
    (REAL, "greedy", "ratio"),
    (REAL, "sampled", "ratio"),
    (REAL, "sampled", "coupled"),
    (REAL, "truncated", "block"),
    (REAL, "full", "ratio"),
]
TREES = [
    (REAL, "greedy", "ratio"),
    (REAL, "sampled", "coupled"),
    (300, "truncated", "coupled"),
    (9001, "truncated", "ratio"),
    (9001, "full", "block"),
]


@pytest.fixture(scope="module", autouse=True)
def _a_gpu_with_clusters():
    platform, device = jax.default_backend(), jax.devices()[0]
    reason = api.why_not("pallas_gpu", platform, 128_256, device)
    if reason is not None:
        pytest.skip(reason)


def kinds_of(width):
    return st.lists(st.sampled_from(KINDS), min_size=width * ROWS, max_size=width * ROWS)


def case_of(kinds, vocab, variant, seed, width):
    of = SETTINGS_OF.get(variant, SETTINGS)
    return arguments(kinds, vocab, seed, width=width, support=32, settings=of)


def assert_outcomes_are_those_of_the_reference(case, vocab, variant, rule, parents=None):
    law = {"tokens": vocab - 5, "rule": rule, "parts": VARIANTS[variant], "parents": parents}
    expected = outcomes(verify(*case, backend="reference", **law))
    assert outcomes(verify(*case, backend="pallas_gpu", **law)) == expected


@pytest.mark.parametrize(("vocab", "variant", "rule"), CHAINS)
@settings(max_examples=20, deadline=None)
@given(kinds_of(WIDTH), st.integers(0, 10**6))
def test_outcomes_are_those_of_the_reference(vocab, variant, rule, kinds, seed):
    case = case_of(kinds, vocab, variant, seed, WIDTH)
    assert_outcomes_are_those_of_the_reference(case, vocab, variant, rule)


@pytest.mark.parametrize(("vocab", "variant", "rule"), TREES)
@settings(max_examples=10, deadline=None)
@given(kinds_of(TREE_WIDTH), st.integers(0, 10**6))
def test_outcomes_of_trees_are_those_of_the_reference(vocab, variant, rule, kinds, seed):
    case, parents = as_trees(case_of(kinds, vocab, variant, seed, TREE_WIDTH), seed)
    assert_outcomes_are_those_of_the_reference(case, vocab, variant, rule, parents)
