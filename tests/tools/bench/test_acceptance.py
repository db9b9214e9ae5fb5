"""Acceptance over the rounds of a variant, by hand."""

from types import SimpleNamespace

import pytest

from ssd_jax.tools.bench.acceptance import acceptance
from tests.tools.bench import fakes


def test_rounds_of_all_prompts_are_joined_by_tokens_and_by_position():
    one = {"acceptance_histogram": [3, 1], "acceptance_by_position": [[2, 4]]}
    two = {"acceptance_histogram": [0, 1, 2], "acceptance_by_position": [[3, 3], [2, 3]]}
    runs = {
        "ar": [fakes.result()],
        "sd": [fakes.result(metrics=one), fakes.result(metrics=two)],
    }
    result = SimpleNamespace(
        variants=("ar", "sd"), runs_of=lambda name: [SimpleNamespace(results=runs[name])]
    )
    [found] = acceptance(result)
    assert (found.variant, found.rounds, found.histogram) == ("sd", 7, (3, 2, 2))
    assert found.length == pytest.approx((3 * 1 + 2 * 2 + 2 * 3) / 7)
    assert found.by_position == ((5, 7), (2, 3))
