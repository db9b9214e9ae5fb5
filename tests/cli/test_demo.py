"""The tables of `ssd-jax demo`, and the rounds that it draws."""

import io

import pytest
from rich.console import Console

from ssd_jax.bench.run import PromptResult
from ssd_jax.cli.demo import DemoRow, behind_a_prompt, draft_cost, speed_table
from ssd_jax.config import Config
from ssd_jax.engine import metrics
from ssd_jax.traces.read import EngineLanes, Slice


def row(name, ids=(1, 2), speed=30.0, ttft=85.0, **found):
    """Two answers of a mode."""
    result = PromptResult(
        token_ids=tuple(ids),
        ttft_ms=ttft,
        itl_ms=(1e3 / speed,),
        metrics=metrics.empty() | found,
    )
    return DemoRow(name, [result, result])


def shown(rows, width=80, **options):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(speed_table(rows, title="all cores", **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_only_columns_with_values():
    table = shown([row("ar"), row("sd", speed=45.0)])
    assert "all cores" in table
    assert "1.50x" in table
    assert "hit" not in table
    assert "yes" in table
    assert "no" in shown([row("ar"), row("sd", ids=(1, 3))])


def test_the_widest_table_fits_80_columns_with_nothing_folded():
    widest = row(
        "ssd",
        speed=1213.4,
        ttft=1190,
        acceptance_length=12.95,
        hit_rate=1.0,
        hidden_draft_share=0.62,
    )
    table = shown([row("ar", speed=10.0), widest], notes=["a note"])
    for part in ("1213.4", "121.34x", "1190", "12.95", "1.00", "0.62", "yes", "a note"):
        assert part in table
    assert all(word in table for word in ("tokens", "token", "length", "identical"))
    assert table.count("mode") == 1


def test_speed_counts_every_token_alike():
    fast, slow = row("x", speed=100.0).results[0], row("x", speed=25.0).results[0]
    assert DemoRow("ssd", [fast, slow]).speed == pytest.approx(40)
    assert DemoRow("ssd", [PromptResult(token_ids=(1,))]).speed is None


@pytest.mark.parametrize(("step", "words"), [(20, "which hides them"), (30, "it waits for its")])
def test_a_draft_is_said_to_be_hidden_where_its_forwards_fit_under_a_verification(step, words):
    config = Config(mode="ssd", draft="d", k="4", budget="8")
    one, other = draft_cost(row("ssd", step_ms=step, verify_ms=85.0), config)
    assert words in other
    assert f"4 draft forwards of 8 branches, {step} ms each" in one
    assert draft_cost(row("ssd", verify_ms=85.0), config) == []


def test_the_rounds_that_are_drawn_have_no_prefill_among_or_beside_them():
    names = ["prefill", *"0123", "prefill", *"4567890", "prefill", "prefill", *"123"]
    target = [
        Slice(name, time, time + 1, {} if name == "prefill" else {"round": time})
        for time, name in enumerate(names)
    ]
    assert behind_a_prompt(EngineLanes(name="ssd", target=target, draft=[])) == (5, 6)
