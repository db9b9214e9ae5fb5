"""The table at the end of `ssd-jax demo`."""

import io

import pytest
from rich.console import Console

from ssd_jax.cli.demo import DemoAnswer, draft_cost, speed_table
from ssd_jax.engine import metrics
from ssd_jax.engine.request import RequestOutput


def answer(name, ids=(1, 2), **found):
    output = RequestOutput(
        prompt_index=0,
        token_ids=list(ids),
        text="x",
        finish_reason="stop",
        metrics=metrics.empty() | found,
    )
    return DemoAnswer(name, output)


def shown(answers, width=80, **options):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(speed_table(answers, **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_only_columns_with_values():
    table = shown([answer("ar", tokens_per_second=30.0), answer("sd", tokens_per_second=45.0)])
    assert "2 tokens" in table
    assert "1.50x" in table
    assert "hit" not in table
    assert "yes" in table
    assert "no" in shown([answer("ar"), answer("sd", ids=(1, 3))])


def test_the_widest_table_fits_a_terminal_with_nothing_cut():
    row = answer(
        "ssd (own int8, k=3)",
        tokens_per_second=121.4,
        ttft_ms=1190,
        acceptance_length=12.95,
        hit_rate=1.0,
        hidden_draft_share=0.62,
    )
    table = shown([answer("ar", tokens_per_second=10.0), row], notes=["a note"])
    for part in (row.name, "121.4", "12.14x", "1190", "12.95", "1.00", "0.62", "yes", "a note"):
        assert part in table
    assert all(word in table for word in ("tokens", "token", "length", "identical"))


@pytest.mark.parametrize(("step", "words"), [(20, "which hides them"), (30, "it waits for its")])
def test_a_draft_is_said_to_be_hidden_where_its_forwards_fit_under_a_verification(step, words):
    cost = draft_cost({"step_ms": step, "verify_ms": 85.0}, 4, 8)
    assert cost is not None
    assert words in cost
    assert f"4 draft forwards of 8 branches, {step} ms each" in cost
    assert draft_cost({"step_ms": None, "verify_ms": 85.0}, 4, 8) is None
