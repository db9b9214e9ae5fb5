"""A recorded trace is played without a model, at its own pace."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from ssd_jax.cli.main import main
from ssd_jax.engine.origin import Origin, TextSpan
from ssd_jax.engine.rounds.trace import RowTrace, Trace
from ssd_jax.errors import InputError
from ssd_jax.tools.demo.replay import play

TARGET, _DRAFT, BRANCH, BACKUP = Origin


@pytest.fixture
def path(tmp_path):
    """Two answers, a second a round; between them the model waits for an hour."""
    trace = Trace(tmp_path / "trace.json", zero=0.0)
    engine = trace.engine("ssd k=2")
    for request, begin, word in ((0, 0.0, "one"), (1, 3600.0, "two")):
        engine.prefill((begin, begin + 1), request, 9)
        engine.text(request, [TextSpan(word, TARGET)], last=False)
        for number, (source, origin) in enumerate((("cold", BACKUP), ("hit", BRANCH))):
            span = (begin + 1 + number, begin + 2 + number)
            engine.round(span, [RowTrace(0, request, source, 2, 1, [5, 6])])
            spans = [TextSpan(f" {source}", origin), TextSpan(" own", TARGET)]
            engine.text(request, spans, last=bool(number))
    trace.write()
    return trace.path


def test_each_answer_is_played_at_the_pace_of_its_rounds(path):
    slept, out = [], io.StringIO()
    play(path, Console(file=out, width=80), sleep=slept.append)
    assert slept == [0, 1, 1] * 2
    lines = out.getvalue().splitlines()
    assert "ssd k=2, as recorded: answer 1 of 2" in lines[0]
    assert lines[1].strip("│ ") == "one ‹cold› own «hit» own"
    assert any("two ‹cold› own «hit» own" in line for line in lines)
    shown = " ".join(lines)
    assert "2 rounds of the target, 2.00 tokens a round; the draft had prepared for 1 of 2" in shown
    assert "2.0 tokens/s" in shown


def test_a_text_that_another_answer_repeats_is_played_once(path):
    text = path.read_text().replace('"two"', '"one"')
    path.write_text(text)
    out = io.StringIO()
    play(path, Console(file=out, width=80), sleep=lambda seconds: None)
    assert "answer 1 of 1" in out.getvalue()


def test_the_command_plays_without_opening_anything(path, capsys, monkeypatch):
    monkeypatch.setattr("ssd_jax.cli.demo.open_llm", None)
    monkeypatch.setattr("ssd_jax.tools.demo.replay.time.sleep", lambda seconds: None)
    assert main(["demo", f"--replay={path}"]) == 0
    assert "one ‹cold› own «hit» own" in capsys.readouterr().out
    assert main(["demo", f"--replay={path}", "--mode=sd"]) == 2
    assert "mode means nothing for demo --replay" in capsys.readouterr().err
    assert main(["demo", "--replay=nowhere.json"]) == 2
    assert "nowhere.json does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda args: args.pop("spans", None), "no text to play"),
        (lambda args: args.update(spans=[["a", "nowhere"]]), "damaged"),
        (lambda args: args.update(spans=3), "damaged"),
    ],
)
def test_a_trace_without_text_or_with_a_damaged_one_is_refused(path, change, words):
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        for args in event["args"].get("rows", [event["args"]]):
            change(args)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=words):
        play(path, Console(file=io.StringIO()), sleep=lambda seconds: None)
