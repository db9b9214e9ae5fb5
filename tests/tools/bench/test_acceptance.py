"""Acceptance over the rounds of a variant, and what the engine costs, by hand."""

from types import SimpleNamespace

import pytest

from ssd_jax.tools.bench import costs
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
        variants=("ar", "sd"), of=lambda name: [SimpleNamespace(results=runs[name])]
    )
    [found] = acceptance(result)
    assert (found.variant, found.rounds, found.histogram) == ("sd", 7, (3, 2, 2))
    assert found.length == pytest.approx((3 * 1 + 2 * 2 + 2 * 3) / 7)
    assert found.by_position == ((5, 7), (2, 3))


def test_what_the_engine_adds_is_its_time_beyond_that_of_its_programs(monkeypatch):
    ms = [[7.0, 5.0, 9.0], [1.0, 2.0, 3.0]]
    monkeypatch.setattr(costs, "in_turns", lambda _runs, **_how: ms)
    found = costs.time_overhead(lambda: None, lambda: None)
    assert (found.engine.value, found.bare.value, found.added.value) == (7, 2, 6)
