"""Requests that end with finish_reason `error`: they are counted, and the exit status is 1."""

import io
import json
import logging
import sys
from unittest import mock

import jax
import pytest

from ssd_jax.cli import suites
from ssd_jax.cli.main import main
from ssd_jax.engine.request import TokenEvent
from ssd_jax.llm.llm import LLM
from ssd_jax.system.cache_dir import cache_dir
from ssd_jax.testing.fakes import finished
from ssd_jax.tools.bench import costs, stats

SMALL = ("--dtype=float32", "--context=300", "--compile_cache=off")


def event(index, reason, **found):
    output = finished("so", reason, index=index, **found)
    return TokenEvent(
        request_id=index, prompt_index=index, token_ids=[5, 6], text="so", output=output
    )


class Engine:
    """Ends its requests for the reasons given, in turn."""

    broken = None

    def __init__(self, reasons):
        self.reasons = iter(reasons)
        self.added = []

    @property
    def has_work(self):
        return bool(self.added)

    def prepare(self, params):
        pass

    def add(self, request):
        self.added.append(request.index)
        return request.index

    def step(self):
        return [event(self.added.pop(), next(self.reasons))]


@pytest.fixture
def fake(monkeypatch, tiny_checkpoint, capsys):
    """Runs a command whose requests end for these reasons: status, output, errors."""

    def run(reasons, command, *arguments, **found):
        engine = Engine(reasons)
        monkeypatch.setattr(LLM, "load", lambda *_args, **_kwargs: None)
        monkeypatch.setattr(LLM, "engine_of", lambda *_args: engine)
        monkeypatch.setattr(
            LLM,
            "run",
            lambda _self, requests, *_mode: iter(
                [event(request.index, next(engine.reasons), **found) for request in requests]
            ),
        )
        status = main([command, f"--target={tiny_checkpoint}", *SMALL, *arguments])
        return status, *capsys.readouterr()

    return run


def test_generate_prints_what_there_is_and_counts(fake, prompts):
    reasons = ["stop", "error", "length"]
    status, out, err = fake(reasons, "generate", f"--prompt_file={prompts}", "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert status == 1
    assert [answer["finish_reason"] for answer in answers] == reasons
    assert err == (
        "ssd-jax generate: 1 of 3 prompts ended with finish_reason error (prompt 1): their text "
        "is incomplete, run them again\n"
    )
    status, out, err = fake(reasons, "generate", f"--prompt_file={prompts}")
    assert status == 1
    assert out.count("so\n") == 3
    assert "[2 tokens, error]" in err
    assert "1 of 3 prompts ended with finish_reason error" in err
    assert fake(["stop"] * 3, "generate", f"--prompt_file={prompts}")[0] == 0


def test_several_texts_of_prompts_are_named(fake, prompts):
    _, out, _ = fake(["stop"] * 2, "generate", "--prompt=a", "--n=2")
    assert out == "--- prompt 0, text 0\nso\n--- prompt 0, text 1\nso\n"
    _, out, _ = fake(["stop"] * 6, "generate", f"--prompt_file={prompts}", "--n=2")
    assert out.count("--- prompt 2, text 1\nso\n") == 1


def test_runs_that_failed_are_not_compared(fake, prompts):
    flags = ("generate", f"--prompt_file={prompts}", "--mode=sd", "--draft=ngram", "--compare=ar")
    for reasons in (["error"] * 3, [*["stop"] * 3, *["error"] * 3]):
        status, _, err = fake(reasons, *flags)
        assert status == 1
        assert "3 of 3 prompts ended with finish_reason error" in err
        assert "identical" not in err


def test_the_same_ids_in_two_modes_are_told_to_be_identical(fake, prompts, monkeypatch):
    monkeypatch.setattr(LLM, "loaded", mock.Mock(exact="distribution"))
    flags = ("generate", f"--prompt_file={prompts}", "--mode=sd", "--draft=ngram", "--compare=ar")
    status, out, err = fake(["stop"] * 6, *flags)
    assert status == 0
    assert out.count("so\n") == 3
    assert "3 of 3 prompts identical (100%)" in err


def test_a_failed_answer_in_a_file_is_none(tmp_path, capsys):
    line = {"prompt_index": 0, "token_ids": [1, 2], "finish_reason": "stop"}
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    other = line | {"prompt_index": 1}
    for path, reason in zip(paths, ("stop", "error"), strict=True):
        lines = [line, other | {"finish_reason": reason}]
        path.write_text("\n".join(json.dumps(answer) for answer in lines))
    assert main(["compare", *map(str, paths)]) == 2
    out = capsys.readouterr().out
    assert "failed" in out
    assert "1 of 1 prompts identical" in out


def test_chat_keeps_what_came_of_a_failed_answer(fake, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"one\ntwo\n/save {tmp_path / 'talk.jsonl'}\n"))
    status, _, err = fake(["error", "stop"], "chat")
    assert status == 1
    assert "ended by an error]" in err
    assert err.endswith("ssd-jax chat: 1 answers ended with finish_reason error; ask again\n")
    (line,) = (tmp_path / "talk.jsonl").read_text().splitlines()
    contents = [message["content"] for message in json.loads(line)["messages"]]
    assert contents == ["one", "so", "two", "so"]


def test_bench_leaves_failed_runs_out_of_its_figures(fake, prompts):
    flags = ("bench", f"--prompts={prompts}", "--warmup=0", "--json")
    status, out, err = fake(["stop", "error", "stop"], *flags)
    assert status == 1
    assert f"1 of 3 runs ended with finish_reason error ({prompts}:1 ar)" in err
    rows = json.loads(out)["prompts"]
    assert [row["ttft_ms"] == [None] for row in rows] == [False, True, False]
    status, _, err = fake(["stop"] * 3, *flags)
    assert status == 0
    status, _, err = fake(["error"] * 3, *flags)
    assert status == 1
    assert "3 of 3 runs ended with finish_reason error" in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "t.json"), "t.json: No space left on device"),
        (PermissionError(13, "Permission denied", "t"), "t: Permission denied; name another one"),
        (
            PermissionError(13, "Permission denied", str(cache_dir() / "weights")),
            f"{cache_dir() / 'weights'}: Permission denied; give another cache by XDG_CACHE_HOME",
        ),
        (jax.errors.JaxRuntimeError("no memory\nat 0x1"), "a device has failed: no memory"),
        (RuntimeError("can't start new thread"), "the system starts no more threads; allow more"),
        (MemoryError(), "out of memory; lower --slots, --context or --budget, or take a smaller"),
    ],
)
def test_an_error_at_the_end_is_told_in_a_line(fake, monkeypatch, error, message):
    def close(_llm):
        raise error

    monkeypatch.setattr(LLM, "close", close)
    status, out, err = fake(["stop"], "generate", "--prompt=x")
    assert status == (2 if isinstance(error, PermissionError) else 1)
    assert "so" in out
    assert err.splitlines()[1].startswith(f"ssd-jax generate: {message}")
    assert len(err.splitlines()) == 2  # and the figures of the text


def test_logged_errors_have_no_traceback(fake):
    assert fake(["stop"], "generate", "--prompt=x")[0] == 0
    record = logging.LogRecord("n", logging.ERROR, "p", 1, "request 1 fails", None, None)
    try:
        raise ValueError
    except ValueError:
        record.exc_info = sys.exc_info()
    assert logging.lastResort is not None
    assert logging.lastResort.format(record) == "request 1 fails"


def test_demo_shows_its_table_before_it_counts_failures(fake):
    flags = ("--mode=sd", "--draft=ngram", "--prompt=Why?")
    shown, warm_up = ["stop"] * 2, ["stop"] * 2
    status, out, err = fake([*shown, *warm_up, "stop", "error"], "demo", *flags)
    assert status == 1
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("ar ", "sd "))] == [
        "ar",
        "sd",
    ]
    assert "1 of 2 answers ended with finish_reason error (demo:0 sd)" in err


def test_demo_without_a_draft_of_the_package_takes_the_targets_own_weights(
    fake, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    variants = 5  # ar, sd with three values of K, ssd
    status, out, _ = fake(["stop"] * (2 + 2 * variants), "demo", "--prompt=Why?")
    assert status == 0
    assert "with the target's own weights in int8 as the draft" in out
    assert "each the same text token for token" in out


def test_bench_reports_every_mode_with_its_acceptance(fake, prompts, monkeypatch):
    """Whose parts of a round are given."""
    estimate = stats.median_interval([2.0])
    rounds = costs.RoundCosts(draft_ms=estimate, verify_ms=estimate, ceiling=2.0)
    monkeypatch.setattr(suites, "_costs", lambda job, mode, k: rounds)
    monkeypatch.setenv("COLUMNS", "80")
    found = {"acceptance_histogram": [1, 0, 0, 2], "acceptance_by_position": [[3, 3], [2, 3]]}
    found |= {"acceptance_length": 2.5, "hit_rate": 0.5, "hidden_draft_share": 0.9}
    flags = (f"--prompts={prompts}", "--mode=sd", "--draft=ngram", "--ks=1,3", "--warmup=0")
    status, out, err = fake(["stop"] * 9, "bench", *flags, "--json", **found)
    assert status == 0
    result = json.loads(out)
    assert [variant["variant"] for variant in result["variants"]] == ["ar", "sd k=1", "sd k=3"]
    assert [variant["identical"] for variant in result["variants"]] == [None, 3, 3]
    assert result["acceptance"][1]["histogram"] == [3, 0, 0, 6]
    assert result["costs"]["sd k=3"]["ceiling"] == 2
    assert result["settings"]["ks"] == ["1", "3"]
    assert result["versions"]["jax"]
    for part in ("tokens/s", "accepted at position", "ceiling", "2.00x", "2.50", "0.50", "0.90"):
        assert part in err
    assert max(map(len, err.splitlines())) <= 80
    assert "\u2026" not in err
    assert all(err.count(f"{name} ") >= 3 for name in ("sd k=1", "sd k=3"))  # names stay whole
