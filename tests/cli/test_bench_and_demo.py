"""`ssd-jax bench`, `demo` and `convert` on a tiny checkpoint; slow where much compiles."""

import dataclasses
import json
import re
from unittest import mock

import numpy as np
import pytest

from ssd_jax.checkpoints.drafts import shipped
from ssd_jax.cli import suites
from ssd_jax.cli.main import main
from ssd_jax.devices.target.programs import Programs
from ssd_jax.llm.llm import LLM
from ssd_jax.testing import tiny
from ssd_jax.tools.bench.run import prompt_result
from ssd_jax.tools.bench.table import Column, build_table
from tests.checkpoints.tiny_drafts import open_target, write

ONE_STEP = ("--suite=step", "--widths=1", "--step_repeats=1")
SMALL = ("--dtype=float32", "--context=300", "--max_tokens=4", "--compile_cache=off")


def run(capsys, *arguments):
    status = main(list(arguments))
    out, err = capsys.readouterr()
    assert status == 0, err
    return out, err


@pytest.mark.slow
def test_prompts_suite_reports_decode_speed_and_latency(tiny_checkpoint, prompts, capsys):
    out, err = run(
        capsys,
        "bench",
        f"--target={tiny_checkpoint}",
        f"--prompts={prompts}",
        "--json",
        "--ignore_eos",
        *SMALL,
    )
    result = json.loads(out)
    (ar,) = result["variants"]
    assert "acceptance" not in result
    assert (ar["variant"], ar["prompts"], ar["tokens"]) == ("ar", 3, 12)
    assert ar["decode_tokens_per_second"]["value"] > 0
    assert ar["itl_p99_ms"] >= ar["itl_p50_ms"] > 0
    assert result["settings"]["target"] == str(tiny_checkpoint)
    assert result["versions"]["jax"]
    assert "tokens/s" in err


@pytest.mark.slow
def test_modes_are_compared_with_acceptance_and_the_ceiling(tiny_checkpoint, prompts, capsys):
    out, err = run(
        capsys,
        "bench",
        f"--target={tiny_checkpoint}",
        f"--draft={tiny_checkpoint}",
        "--mode=sd",
        "--ks=1,3",
        f"--prompts={prompts}",
        "--json",
        "--ignore_eos",
        *SMALL,
        "--max_tokens=9",
    )
    result = json.loads(out)
    assert [v["variant"] for v in result["variants"]] == ["ar", "sd k=1", "sd k=3"]
    assert [v["identical"] for v in result["variants"]] == [None, 3, 3]
    # The draft is the target: all is accepted, so 8 tokens take 4 rounds of 2, or 2 of 4.
    assert [entry["histogram"] for entry in result["acceptance"]] == [[0, 12], [0, 0, 0, 6]]
    assert result["acceptance"][1]["by_position"] == [[6, 6]] * 3
    costs = result["costs"]["sd k=3"]
    ratio = costs["draft_ms"]["value"] / costs["verify_ms"]["value"]
    assert costs["ceiling"] == pytest.approx((1 + ratio) / max(1, ratio))
    assert "ceiling" in err
    assert "accepted at position" in err


def test_an_empty_line_is_between_tables_and_what_loading_said_is_said_once(
    tiny_checkpoint, capsys, monkeypatch
):
    tables = [build_table([Column(name, str)], [1]) for name in ("one", "two")]
    suite = suites.Suite(lambda _job: suites.SuiteReport(tables, {}))
    monkeypatch.setitem(suites.SUITES, "step", suite)
    command = ("bench", "--suite=step", f"--target={tiny_checkpoint}")
    with mock.patch.multiple(LLM, load=mock.Mock(), notices=("exact = 'auto' is distribution",)):
        out, _ = run(capsys, *command)
        document = json.loads(run(capsys, *command, "--json")[0])
    assert document["notices"] == ["exact = 'auto' is distribution"]
    _headline, *lines = map(str.strip, out.splitlines())
    assert lines == ["one", "───", "1", "", "two", "───", "1"]


@pytest.mark.parametrize(
    "flags", [("--widths=2,1",), pytest.param((), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_step_suite_times_every_width(tiny_checkpoint, capsys, flags):
    out, _ = run(
        capsys,
        "bench",
        "--suite=step",
        *flags,
        f"--target={tiny_checkpoint}",
        "--step_repeats=2",
        "--json",
        *SMALL,
    )
    result = json.loads(out)
    assert [row["width"] for row in result["steps"]] == ([2, 1] if flags else [*range(1, 18)])
    assert result["bandwidth"]["copy_gb_per_s"] > 0


def test_step_suite_runs_tokens_that_differ(tiny_checkpoint, capsys, monkeypatch):
    """Rows of one token would use the same experts."""
    seen = {}

    def compile_forward(_programs, proposed):
        def program(_parameters, pages, _table, pending, tokens, _lengths):
            seen[proposed + 1] = np.column_stack([pending, tokens[:, :proposed]])
            return np.zeros(1), pages

        return program

    monkeypatch.setattr(Programs, "compile_forward", compile_forward)
    command = ("bench", *ONE_STEP[:1], "--widths=1,5", *ONE_STEP[2:], "--slots=3")
    run(capsys, *command, f"--target={tiny_checkpoint}", *SMALL)
    assert {width: (rows.shape, np.unique(rows).size) for width, rows in seen.items()} == {
        1: ((3, 1), 3),
        5: ((3, 5), 15),
    }


@pytest.mark.more
def test_step_suite_counts_the_weights_that_are_read(tmp_path, capsys):
    """An embedding that is the head is read whole; beside a head of its own it is looked up in."""
    found = set()
    for tied in (True, False):
        path = tiny.write_checkpoint(tmp_path / str(tied), tie_word_embeddings=tied)
        command = ("bench", *ONE_STEP, f"--target={path}", "--json")
        found.add(json.loads(run(capsys, *command, *SMALL)[0])["weight_bytes"])
    assert len(found) == 1


@pytest.mark.more
def test_step_suite_counts_the_weights_of_one_device(tiny_checkpoint, capsys):
    """Its memory is what is measured."""
    command = ("bench", *ONE_STEP, f"--target={tiny_checkpoint}", "--json")
    one, half = (
        json.loads(run(capsys, *command, f"--mesh=tensor={count}", *SMALL)[0])["weight_bytes"]
        for count in (1, 2)
    )
    assert one / 2 <= half < 0.6 * one


def test_perplexity_suite_scores_a_text(tiny_checkpoint, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy. " * 8)
    arguments = ("bench", "--suite=perplexity", f"--target={tiny_checkpoint}", *SMALL)
    out, err = run(capsys, *arguments, f"--text={text}", "--window=64", "--windows=2", "--json")
    assert json.loads(out)["perplexity"] > 1
    assert "perplexity" in err
    assert main([*arguments, "--window=64"]) == 2
    assert "needs a text" in capsys.readouterr().err
    assert main([*arguments, f"--text={text}", "--window=301"]) == 2
    assert "window = 301 is more than the context of 300" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_compares_mode_auto_with_others(tiny_checkpoint, prompts, capsys):
    out, err = run(
        capsys,
        "bench",
        f"--target={tiny_checkpoint}",
        "--draft=ngram",
        "--modes=ar,auto,sd",
        f"--prompts={prompts}",
        "--json",
        "--ignore_eos",
        *SMALL,
    )
    result = json.loads(out)
    assert [variant["variant"] for variant in result["variants"]] == ["ar", "auto", "sd k=auto"]
    assert all(variant["identical"] for variant in result["variants"][1:])
    assert "costs" not in result  # rounds of whatever K is chosen
    assert "mode auto takes " in err


@pytest.fixture
def demo(tiny_checkpoint, capsys, monkeypatch, tmp_path):
    """What the demo prints about a tiny target, piped."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("demo", f"--target={tiny_checkpoint}", "--ignore_eos", *SMALL, "--max_tokens=24")
    shared = f"--compile_cache={tmp_path / 'programs'}"  # by the processes of the demo
    return lambda *also: run(capsys, *arguments, shared, *also)[0]


@pytest.mark.slow
def test_demo_shows_an_answer_then_every_mode(demo, tmp_path, monkeypatch):
    out = demo("--full")
    assert "> Write a for loop" in out
    assert "tokens:" in out
    assert "with the target's own weights in int8 as the draft" in out
    assert "measured: 5 answers in every mode, each the same text token for token" in out
    assert re.search(r"\nmeasured here: \w+, float32", out)
    assert out.count("\nevery mode\n") == 1
    for mode in ("sd k=1", "sd k=3", "ssd k=3"):
        assert len(re.findall(rf"\n{mode} .* yes", out)) == 1
    assert (tmp_path / "ssd_jax" / "demo-trace.png").exists()

    def another_text(llm, prompt, params, mode, k):
        other = dataclasses.replace(prompt, prompt=(prompt.prompt or "") + mode)
        return prompt_result(llm, other, params, mode, k)

    monkeypatch.setattr("ssd_jax.cli.demo.prompt_result", another_text)
    out = demo("--mode=sd", "--draft=ngram", "--prompt=Why?")
    assert "> Why?" in out
    assert re.search(r"\nsd .* no", out)
    assert "ssd" not in out


@pytest.mark.slow
def test_demo_takes_the_draft_of_the_package(demo, tiny_checkpoint, monkeypatch, tmp_path, capsys):
    target = open_target(tiny_checkpoint)
    write(tmp_path / "drafts" / "light", target, None, layers=1)
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path / "drafts")
    out = demo("--prompt=Why?")
    assert "with the package's draft" in out
    assert "measured here: " in out
    assert "measured: 1 answer in every mode" in out
    trace = tmp_path / "ssd_jax" / "demo-trace.json"
    assert trace.with_suffix(".png").exists()
    monkeypatch.setattr("ssd_jax.tools.demo.replay.time.sleep", lambda seconds: None)
    assert "ssd k=4, as recorded: answer 1 of " in run(capsys, "demo", f"--replay={trace}")[0]


@pytest.mark.slow
def test_a_converted_checkpoint_generates_the_same(tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "converted"
    run(capsys, "convert", f"--target={tiny_checkpoint}", f"--out={out}", "--dtype=float32")
    answers = [
        json.loads(
            run(capsys, "generate", f"--target={path}", "--prompt=hello", "--json", *SMALL)[0]
        )
        for path in (tiny_checkpoint, out)
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert main(["convert", f"--target={tiny_checkpoint}", f"--out={out}"]) == 2
    assert str(out) in capsys.readouterr().err
    assert main(["convert", f"--target={tiny_checkpoint}"]) == 2
