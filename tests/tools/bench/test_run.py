from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.bench.run import (
    PromptResult,
    alternating_orders,
    first_difference,
    prompt_result,
    run_paired,
)
from tests.tools.bench import fakes


def order_of(log: list[tuple[str, int]]) -> list[str]:
    return [f"{name}{index}" for name, index in log]


def run_recorded(names: str, count: int, **options) -> list[tuple[str, int]]:
    log: list[tuple[str, int]] = []
    variants = {name: fakes.recorded(name, log) for name in names}
    run_paired(variants, fakes.prompts(count), **options)
    return log


def test_two_variants_take_turns_at_going_first():
    log = run_recorded("AB", 4, warmup=0, repeats=1)
    assert order_of(log) == ["A0", "B0", "B1", "A1", "A2", "B2", "B3", "A3"]


@pytest.mark.parametrize("count", [2, 3])
def test_a_prompt_changes_its_order_in_the_next_repeat(count):
    log = run_recorded("AB", count, warmup=0, repeats=2)
    first, second = log[: 2 * count], log[2 * count :]
    for index in range(count):
        before = [name for name, place in first if place == index]
        after = [name for name, place in second if place == index]
        assert after == before[::-1]


def test_each_of_three_variants_takes_each_place_and_precedes_each_other_equally_often():
    orders = alternating_orders("ABC")
    for place in range(3):
        names = [order[place] for order in orders]
        assert {names.count(name) for name in "ABC"} == {len(orders) // 3}
    for one, other in [("A", "B"), ("A", "C"), ("B", "C")]:
        before = sum(order.index(one) < order.index(other) for order in orders)
        assert before == len(orders) / 2


def test_warm_up_runs_each_variant_first_and_is_not_recorded():
    log: list[tuple[str, int]] = []
    progress: list[tuple[int, int]] = []
    variants = {name: fakes.recorded(name, log) for name in "AB"}
    result = run_paired(
        variants,
        fakes.prompts(2),
        warmup=3,
        repeats=1,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert order_of(log[:6]) == ["A0", "B0", "A1", "B1", "A0", "B0"]
    assert [len(runs.results) for runs in result.runs] == [1, 1, 1, 1]
    assert progress == [(done, 10) for done in range(1, 11)]


def test_runs_are_kept_by_prompt_and_variant_whatever_order_they_ran_in():
    def variant(offset: int):
        return lambda prompt: fakes.result([offset + prompt.index])

    result = run_paired({"A": variant(0), "B": variant(100)}, fakes.prompts(3), warmup=0, repeats=2)
    found = [
        (runs.prompt.index, runs.variant, [repeat.token_ids for repeat in runs.results])
        for runs in result.runs
    ]
    assert found == [
        (index, name, [(offset + index,)] * 2)
        for index in range(3)
        for name, offset in (("A", 0), ("B", 100))
    ]
    assert [runs.variant for runs in result.runs_of("B")] == ["B", "B", "B"]


def test_decode_speed_leaves_out_the_prefill_and_its_token():
    result = PromptResult.from_times([5, 6, 7], start=1.0, token_times=[3.0, 3.25, 3.5])
    assert result.ttft_ms == 2000
    assert result.itl_ms == (250, 250)
    assert result.decode_tokens_per_second == 4


def test_tokens_committed_together_each_count_as_one():
    result = PromptResult.from_times(range(5), start=0.0, token_times=[1, 2, 2, 2, 3])
    assert result.itl_ms == (1000, 0, 0, 1000)
    assert result.decode_tokens_per_second == 2


def test_each_token_of_an_event_counts():
    def run(requests, mode, k):
        for token_ids in ([1], [2, 3, 4], [5, 6]):
            output = SimpleNamespace(finish_reason="length", metrics={}) if 6 in token_ids else None
            yield SimpleNamespace(token_ids=token_ids, output=output)

    llm: Any = SimpleNamespace(request=lambda *about: about, run=run)
    (prompt,) = fakes.prompts(1)
    result = prompt_result(llm, prompt, SamplingParams(), "ar", None)
    assert result.token_ids == (1, 2, 3, 4, 5, 6)
    assert len(result.itl_ms) == 5


@pytest.mark.parametrize(("ids", "times"), [([], []), ([1], [0.5]), ([1, 2], [0.5, 0.5])])
def test_without_time_between_tokens_there_is_no_decode_speed(ids, times):
    result = PromptResult.from_times(ids, start=0.0, token_times=times)
    assert result.decode_tokens_per_second is None
    assert result.ttft_ms == (500 if ids else None)


@pytest.mark.parametrize(
    ("ids", "place"),
    [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([], 0)],
)
def test_the_first_difference_counts_a_missing_token(ids, place):
    assert first_difference(ids, [1, 2, 3]) == place
