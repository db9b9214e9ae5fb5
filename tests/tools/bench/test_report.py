from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from ssd_jax.system import environment
from ssd_jax.tools.bench import costs, report
from ssd_jax.tools.bench.costs import costs_table, time_round
from ssd_jax.tools.bench.report import speed_ratio, summarize
from ssd_jax.tools.bench.run import BenchResult, PromptResult, run_paired
from tests.tools.bench import fakes


def rendered(table, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


def measure(*, repeats: int = 1, count: int = 8, metrics=None, ids=None) -> BenchResult:
    """Base "ar" at 10 + index tokens/s; "sd" at twice that, with its ids and metrics."""

    def ar(prompt):
        return fakes.result([prompt.index, 2, 3], tokens_per_second=10 + prompt.index)

    def sd(prompt):
        tokens = ids(prompt.index) if ids else [prompt.index, 2, 3]
        return fakes.result(
            tokens, tokens_per_second=20 + 2 * prompt.index, ttft=0.25, metrics=metrics
        )

    return run_paired({"ar": ar, "sd": sd}, fakes.prompts(count), warmup=0, repeats=repeats)


def test_a_summary_has_the_speed_of_all_prompts_together_and_the_quotient_of_two_speeds():
    base, sd = summarize(measure())
    assert base.decode_tokens_per_second.value == pytest.approx(
        8 / sum(1 / (10 + index) for index in range(8))  # as many tokens of each
    )
    assert sd.decode_tokens_per_second.value == pytest.approx(
        2 * base.decode_tokens_per_second.value
    )
    assert base.ratio is None
    assert sd.ratio.value == pytest.approx(2)
    assert sd.ratio.high - sd.ratio.low < 1e-9
    assert sd.ttft_ms.value == pytest.approx(250)
    assert (sd.prompts, sd.tokens) == (8, 24)


def test_a_ratio_in_the_table_is_the_quotient_of_the_speeds_beside_it():
    """Also where the median of the ratios, prompt by prompt, is another."""
    speeds = {"ar": (10, 20, 90), "sd": (30, 30, 45)}
    lengths = (3, 9, 200)

    def of(name):
        return lambda prompt: fakes.result(
            range(lengths[prompt.index]), tokens_per_second=speeds[name][prompt.index]
        )

    variants = {name: of(name) for name in speeds}
    table = rendered(
        report.bench_table(run_paired(variants, fakes.prompts(3), warmup=0, repeats=1))
    )
    ar, sd = (next(x for x in table.splitlines() if x.startswith(name)).split() for name in speeds)
    assert sd[2] == f"{float(sd[1]) / float(ar[1]):.2f}x" != "1.50x"


def test_inter_token_percentiles_are_over_all_tokens_not_over_prompts():
    def variant(prompt):
        tokens, speed = (99, 100) if prompt.index == 0 else (3, 1)
        return fakes.result(range(tokens), tokens_per_second=speed)

    (summary,) = summarize(run_paired({"a": variant}, fakes.prompts(2), warmup=0, repeats=1))
    p50, p95, p99 = summary.itl_ms  # 98 gaps of 10 ms and 2 of 1000 ms
    assert (p50, p95) == (pytest.approx(10), pytest.approx(10))
    assert p99 == pytest.approx(1000)


def test_all_repeats_count():
    speeds = iter([10, 40, 11])
    result = run_paired(
        {"a": lambda prompt: fakes.result(tokens_per_second=next(speeds))},
        fakes.prompts(1),
        warmup=0,
        repeats=3,
    )
    assert summarize(result)[0].decode_tokens_per_second.value == pytest.approx(
        3 / (1 / 10 + 1 / 40 + 1 / 11)
    )


def test_equal_ids_are_identical():
    base, sd = summarize(measure())
    assert (base.identical, sd.identical) == (None, 8)
    assert "yes" in rendered(report.bench_table(measure()))


def test_a_failed_answer_is_identical_to_nothing():
    failed = PromptResult(token_ids=(), failed=True)
    result = run_paired(
        {
            "a": lambda prompt: failed,
            "b": lambda prompt: failed if prompt.index else fakes.result(),
        },
        fakes.prompts(2),
        warmup=0,
        repeats=1,
    )
    assert summarize(result)[1].identical == 0


def test_one_different_token_makes_the_table_say_no():
    table = rendered(report.bench_table(measure(ids=lambda i: [i, 2, 3 + (i == 5)])))
    assert "no\n" in table.replace(" ", "")
    assert "7/8" in table
    assert "yes" not in table


def test_one_different_token_makes_a_prompt_not_identical_and_is_located():
    result = measure(ids=lambda index: [index, 2, 9] if index == 3 else [index, 2, 3])
    assert summarize(result)[1].identical == 7
    table = rendered(report.bench_table(result))
    assert "7/8" in table
    assert "yes" not in table
    rows = report.bench_content(result)["prompts"]
    forks = {(row["variant"], row["index"]): row["first_difference"] for row in rows}
    assert forks.pop(("sd", 3)) == 2
    assert set(forks.values()) == {None}


def test_a_difference_in_any_repeat_counts_also_of_the_base_itself():
    ids = iter([[1, 2], [1, 2], [1, 9], [1, 2]])  # a, b; b's second run, a's second run
    variant = lambda prompt: fakes.result(next(ids))  # noqa: E731
    result = run_paired({"a": variant, "b": variant}, fakes.prompts(1), warmup=0, repeats=2)
    assert [summary.identical for summary in summarize(result)] == [1, 0]
    repeats = iter([[1], [2]])
    alone = run_paired(
        {"a": lambda prompt: fakes.result(next(repeats))}, fakes.prompts(1), warmup=0, repeats=2
    )
    assert summarize(alone)[0].identical == 0


def test_the_json_has_every_key_and_survives_a_round_trip():
    metrics = {
        "acceptance_length": 2.5,
        "acceptance_histogram": [1, 2],
        "hit_rate": None,
        "verify_ms": float("nan"),
        "greedy": True,
        "step_ms": np.float32(4),
    }
    document = report.document(
        "prompts",
        settings={"max_tokens": 3},
        environment=environment.describe(),
        **report.bench_content(measure(metrics=metrics, repeats=2)),
    )
    document = json.loads(json.dumps(document, allow_nan=False))
    assert set(document) == {
        "schema_version",
        "suite",
        "time",
        "device",
        "device_count",
        "platform",
        "versions",
        "commit",
        "commit_modified",
        "cpu_model",
        "cpu_count",
        "cpu_affinity",
        "os",
        "settings",
        "base",
        "variants",
        "prompts",
    }
    assert set(document["versions"]) == {"python", "ssd_jax", "jax", "jaxlib", "flax", "numpy"}
    assert None not in document["versions"].values()
    sd = document["variants"][1]
    assert set(sd) == {
        "variant",
        "prompts",
        "tokens",
        "decode_tokens_per_second",
        "ratio",
        "ttft_ms",
        "itl_p50_ms",
        "itl_p95_ms",
        "itl_p99_ms",
        "identical",
        "metrics",
    }
    assert set(sd["ratio"]) == {"value", "low", "high", "count"}
    assert {name: found["value"] for name, found in sd["metrics"].items()} == {
        "acceptance_length": 2.5,
        "step_ms": 4,
    }
    assert len(document["prompts"]) == 16
    row = document["prompts"][1]
    assert (row["variant"], row["token_ids"]) == ("sd", [0, 2, 3])
    assert row["ttft_ms"] == pytest.approx([250, 250])
    assert row["metrics"][1] == {**metrics, "verify_ms": None, "step_ms": 4}


def test_a_column_shows_only_where_a_variant_has_a_value():
    plain = rendered(report.bench_table(measure()))
    assert "a round" not in plain
    assert "hidden" not in plain
    rich = rendered(report.bench_table(measure(metrics={"acceptance_length": 2.5})))
    assert "a round" in rich
    assert "2.50" in rich
    assert "hidden" not in rich


@pytest.mark.parametrize("width", [80, 100])
def test_the_widest_table_is_whole_with_nothing_cut(width):
    metrics = {"acceptance_length": 2.5, "hit_rate": 0.85, "hidden_draft_share": 0.9}
    result = measure(metrics=metrics, ids=lambda index: [index, index])
    named = dataclasses.replace(
        result,
        variants=("ar", "ssd draft=[default] k=8"),
        runs=tuple(
            dataclasses.replace(runs, variant="ssd draft=[default] k=8")
            if runs.variant == "sd"
            else runs
            for runs in result.runs
        ),
    )
    table = rendered(report.bench_table(named), width)
    assert max(map(len, table.splitlines())) <= width
    assert "…" not in table
    for shown in ("13.1", "2.00x", "2.50", "0.85", "0.90", "0/8", "ssd draft=[default] k=8"):
        assert shown in table


def test_few_prompts_are_told_to_have_no_interval():
    assert "need 6 prompts" in rendered(report.bench_table(measure(count=5)))
    assert "need 6 prompts" not in rendered(report.bench_table(measure(count=6)))


def test_verification_hides_no_more_of_a_draft_than_it_lasts(monkeypatch):
    monkeypatch.setattr(costs, "in_turns", lambda _, rounds: [[40.0] * rounds, [10.0] * rounds])
    assert time_round(lambda: None, lambda: None).ceiling == pytest.approx(1.25)


def test_what_ssd_gained_stands_beside_the_ceiling(monkeypatch):
    def sd(prompt):
        return fakes.result(tokens_per_second=10 + prompt.index)

    def ssd(prompt):
        return fakes.result(tokens_per_second=15 + 1.5 * prompt.index)

    result = run_paired({"sd k=4": sd, "ssd k=4": ssd}, fakes.prompts(8), warmup=0, repeats=1)
    gain = speed_ratio(result, "ssd k=4", "sd k=4")
    assert gain is not None
    assert gain.value == pytest.approx(1.5)
    monkeypatch.setattr(costs, "in_turns", lambda _, rounds: [[30.0] * rounds, [40.0] * rounds])
    parts = time_round(lambda: None, lambda: None)
    assert parts.ceiling == pytest.approx(1.75)
    for found, shown in ((gain, True), (None, False)):
        table = rendered(costs_table({"sd k=4": dataclasses.replace(parts, gain=found)}))
        assert "1.75x" in table
        assert ("ssd / sd" in table) is ("1.50x" in table) is shown


def test_the_commit_is_null_where_the_package_is_not_a_checkout(tmp_path):
    assert environment.commit(tmp_path) == {"commit": None, "commit_modified": None}
    (tmp_path / ".git").mkdir()  # not a repository after all
    assert environment.commit(tmp_path) == {"commit": None, "commit_modified": None}


@pytest.mark.parametrize(
    ("commit", "modified", "shown"),
    [("0123456789abcdef", True, "012345678+changes"), (None, None, "0.1.0")],
)
def test_the_headline_names_the_processor_the_cores_and_what_was_measured(commit, modified, shown):
    facts = {
        "device": "cpu",
        "platform": "cpu",
        "cpu_model": "Xeon",
        "cpu_count": 8,
        "cpu_affinity": [2, 3],
        "versions": {"jax": "0.10.2", "ssd_jax": "0.1.0"},
        "commit": commit,
        "commit_modified": modified,
    }
    assert environment.headline(facts) == f"Xeon, 2/8 cores, jax 0.10.2, ssd_jax {shown}"
    on_gpu = facts | {"platform": "gpu", "device": "NVIDIA H200", "cpu_affinity": None}
    assert environment.headline(on_gpu).startswith("NVIDIA H200, 8/8 cores")
