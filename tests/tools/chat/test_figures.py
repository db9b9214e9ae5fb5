"""Figures after an answer and over the session."""

import io

import pytest
from rich.console import Console

from ssd_jax.engine.request import FinishReason
from ssd_jax.testing.fakes import finished
from ssd_jax.tools.chat.figures import Answer, figures, stats_table, summary


def answer(tokens, *, mode="ar", reason: FinishReason = "stop", limit=None, prompt=10, **found):
    output = finished("x", reason, token_ids=[1] * tokens, limit=limit, **found)
    return Answer(mode=mode, prompt_tokens=prompt, output=output)


AR = answer(11, tokens_per_second=10.0, ttft_ms=100.0)
SD = answer(
    6, mode="sd", tokens_per_second=20.0, ttft_ms=300.0, acceptance_histogram=[1, 2], prompt=20
)


def ssd(histogram, **found):
    return answer(9, mode="ssd", acceptance_histogram=histogram, **found)


def test_speeds_and_acceptance_lengths_weigh_each_token_alike():
    found = figures([AR, SD])
    assert (found.answers, found.prompt_tokens, found.answer_tokens) == (2, 30, 17)
    assert found.tokens_per_second == pytest.approx(15 / (10 / 10 + 5 / 20))
    assert found.first_token_ms == 200
    assert found.acceptance_length == pytest.approx(5 / 3)


def test_hit_rates_weigh_each_look_up_alike():
    """A forward that looked nothing up, such as one with room for one token, does not count."""
    every = ssd([1, 1], hit_rate=1.0, hit_rate_by_k=[(0, 0), (1, 1)], miss_causes={})
    causes = {"miss": 1, "cold": 1}
    seldom = ssd([4], hit_rate=1 / 3, hit_rate_by_k=[(1, 2)], miss_causes=causes)
    cold = ssd([1], hit_rate=0.0, miss_causes={"cold": 1})
    assert figures([AR, every, seldom]).hit_rate == pytest.approx(2 / 4)
    assert figures([every]).hit_rate == 1
    assert figures([every, cold]).hit_rate == pytest.approx(1 / 2)
    assert figures([AR, SD]).hit_rate is None
    assert "hit rate 0.33" in summary(seldom, 2048)


def test_figures_that_do_not_apply_are_left_out():
    nothing = answer(1)
    found = figures([nothing])
    assert (found.tokens_per_second, found.first_token_ms, found.acceptance_length) == (None,) * 3
    assert summary(nothing, 2048) == "[1 token, context 11 of 2048]"


def test_the_summary_says_why_an_answer_ended_early():
    assert summary(AR, 2048) == "[11 tokens, 10.0 tokens/s, context 21 of 2048]"
    assert "acceptance length 1.67" in summary(SD, 2048)
    assert summary(answer(3, reason="cancelled"), 99).endswith(", stopped]")
    asked, full = (answer(3, reason="length", limit=limit) for limit in ("max_tokens", "context"))
    assert summary(asked, 13).endswith(", cut off by --max_tokens]")
    assert summary(full, 13).endswith(", cut off: the context is full]")


def test_the_table_has_a_column_for_each_mode():
    console = Console(file=io.StringIO(), width=100)
    console.print(stats_table([AR, SD, SD], 2048))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].split("  ")[-2:] == ["session, ar", "session, sd"]
    assert "last answer (sd)" in lines[0]
    cells = {line[:34].strip(): line[34:].split() for line in lines[2:]}
    assert cells["answers"] == ["1", "1", "2"]
    assert cells["decoding, tokens/s"] == ["20.0", "10.0", "20.0"]
    assert cells["acceptance length, tokens/forward"] == ["1.67", "-", "1.67"]
    assert cells["context used, of 2048 tokens"] == ["26"]
