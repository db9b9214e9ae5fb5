"""`--trace` on a tiny checkpoint: what is written when a run ends, and when it is interrupted."""

from __future__ import annotations

import gc
import json

import pytest

from ssd_jax.cli.main import main
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.traces.read import read_trace
from tests.engine.rounds.trace_schema import check_schema

SMALL = ("--dtype=float32", "--context=300", "--compile_cache=off", "--ignore_eos")


def generate(checkpoint, *arguments):
    prompt = ("--prompt=hello", "--max_tokens=9")
    status = main(["generate", f"--target={checkpoint}", *prompt, *SMALL, *arguments])
    gc.collect()  # the model goes, as at the end of the program
    return status


def test_a_run_is_traced_from_the_prompt_to_the_last_token(tiny_checkpoint, tmp_path):
    path = tmp_path / "trace.json"
    assert generate(tiny_checkpoint, f"--trace={path}", "--mode=sd", "--draft=ngram", "--k=2") == 0
    check_schema(json.loads(path.read_text()))
    (engine,) = read_trace(path)
    assert engine.name == "sd k=2"
    assert engine.target[0].name == "prefill"
    assert sum(round_.committed for round_ in engine.rounds) == 8
    assert engine.drafts == []


@pytest.mark.more
def test_an_interrupted_run_leaves_what_it_has(tiny_checkpoint, tmp_path, monkeypatch):
    path, run = tmp_path / "trace.json", LLM.run

    def interrupted(self, *arguments):
        events = run(self, *arguments)
        for _ in range(4):
            yield next(events)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "run", interrupted)
    assert generate(tiny_checkpoint, f"--trace={path}", "--max_tokens=280") == 130
    check_schema(json.loads(path.read_text()))
    (engine,) = read_trace(path)
    assert 3 <= len(engine.rounds) < 279  # rounds go on until the interrupt is seen


@pytest.mark.more
def test_the_python_interface_writes_the_trace_on_close_with_every_mode(tiny_checkpoint, tmp_path):
    path = tmp_path / "trace.json"
    settings = {"mode": "sd", "draft": "ngram", "k": "2", "trace": str(path)}
    settings |= {"dtype": "float32", "context": 300, "compile_cache": "off"}
    with LLM(str(tiny_checkpoint), **settings) as llm:
        for mode in ("ar", "sd"):
            llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True), mode=mode)
        assert not path.exists()
    check_schema(json.loads(path.read_text()))
    assert [engine.name for engine in read_trace(path)] == ["ar", "sd k=2"]
    path.unlink()
    llm.close()
    assert not path.exists()  # it is written once


def test_a_bad_trace_path_is_refused_before_anything_is_opened(tmp_path, capsys):
    for trace, words in ((tmp_path, "is a directory"), (tmp_path / "no" / "t", "no directory")):
        assert main(["generate", "--target=missing", "--prompt=a", f"--trace={trace}"]) == 2
        assert words in capsys.readouterr().err
    assert main(["generate", "--target=missing", "--prompt=a", "--trace="]) == 2
    assert "trace is empty" in capsys.readouterr().err
    assert main(["bench", "--suite=step", f"--trace={tmp_path}/t"]) == 2
    assert "suite = 'step' does none" in capsys.readouterr().err


@pytest.mark.more
def test_without_the_flag_no_trace_is_written(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert generate(tiny_checkpoint) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_is_a_directory_is_refused(tiny_checkpoint, tmp_path, capsys):
    path = tmp_path / "trace.json"
    assert generate(tiny_checkpoint, f"--trace={path}") == 0
    assert main(["trace", str(path), f"--output={tmp_path}"]) == 2
    assert f"output = '{tmp_path}' is a directory; give a file" in capsys.readouterr().err
