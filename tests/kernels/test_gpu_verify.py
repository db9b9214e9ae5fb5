"""Verification by Pallas on a GPU."""

from __future__ import annotations

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.kernels.verify import api
from ssd_jax.sampling.variants import VARIANTS
from tests.kernels.verify_cases import KINDS, arguments, outcomes, verify

pytestmark = [pytest.mark.gpu, pytest.mark.shipped]

WIDTH, ROWS = 3, 4


@pytest.fixture(scope="module", autouse=True)
def _a_gpu_with_clusters():
    platform, device = jax.default_backend(), jax.devices()[0]
    reason = api.why_not("pallas_gpu", platform, 128_256, device)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("vocab", [300, 9001, 128_256])
@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=WIDTH * ROWS, max_size=WIDTH * ROWS),
    st.integers(0, 10**6),
)
def test_outcomes_are_those_of_the_reference(vocab, rule, kinds, seed):
    case = arguments(kinds, vocab, seed, width=WIDTH)
    law = {"tokens": vocab - 5, "rule": rule, "parts": VARIANTS["truncated"]}
    expected = outcomes(verify(*case, backend="reference", **law))
    assert outcomes(verify(*case, backend="pallas_gpu", **law)) == expected
