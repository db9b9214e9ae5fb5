"""Every token of a text says where it comes from, and its spans are the text."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.origin import Origin, origins, spans
from ssd_jax.engine.request import Request
from ssd_jax.engine.rounds.trace import Trace
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget, Letters
from tests.fakes.instrument import instrument

TARGET, DRAFT, BRANCH, BACKUP = Origin


def letter(_prompt, position):
    return 97 + position % 26


def streamed(sources=(), trace=None, wrong=lambda position: False, **params):
    """The events of twelve letters, of which a round proposes three; from these sources, one after
    the other, as those of a speculation cache."""
    left = iter(sources)

    def with_source(drafted):
        source = next(left, None)
        return drafted if source is None else dataclasses.replace(drafted, sources={0: source})

    drafter = FakeDrafter(letter, wrong=wrong)
    instrument(drafter, change={"propose": with_source})
    engine = Engine(FakeTarget(letter), Letters, frozenset(), drafter=drafter, trace=trace)
    params = SamplingParams(max_tokens=12, **params)
    engine.add(Request(prompt_ids=[97, 98], params=params))
    found = []
    while engine.has_work:
        found += engine.step()
    return found


@pytest.mark.parametrize(
    ("source", "origin"),
    [(None, DRAFT), ("hit", BRANCH), ("miss", BACKUP), ("cold", BACKUP), ("late", BACKUP)],
)
def test_accepted_tokens_are_the_drafts_and_the_last_one_is_the_targets(source, origin):
    assert origins(source, 2, 3) == [origin, origin, TARGET]
    assert origins(source, 2, 1) == [origin]
    assert origins(source, 0, 1) == [TARGET]


def test_a_streamed_answer_says_of_each_token_where_it_comes_from():
    events = streamed(["cold", "hit", "miss"])
    assert "".join(event.text for event in events) == "cdefghijklmn"
    found = [span for event in events for span in event.spans]
    assert "".join(span.text for span in found) == "cdefghijklmn"
    assert [span.origin for span in found] == [
        TARGET,
        *[BACKUP, BACKUP, BACKUP, TARGET],
        *[BRANCH, BRANCH, BRANCH, TARGET],
        *[BACKUP, BACKUP, TARGET],
    ]


def test_a_rejected_token_is_replaced_by_one_of_the_targets():
    events = streamed(wrong=lambda position: position == 4)
    found = [span.origin for event in events for span in event.spans]
    assert found[:3] == [TARGET, DRAFT, TARGET]


def test_text_that_a_stop_string_held_back_keeps_its_origin():
    events = streamed(["hit"] * 9, stop=["fgz", "kl"])
    assert "".join(event.text for event in events) == "cdefghij"
    for event in events:
        assert "".join(span.text for span in event.spans) == event.text
    found = {span.text: span.origin for event in events for span in event.spans}
    assert [found[letter] for letter in "cfgh"] == [TARGET, BRANCH, TARGET, BRANCH]


def test_text_behind_the_last_token_belongs_to_it():
    assert spans("abc", [1, 2], [DRAFT, TARGET]) == [("a", DRAFT), ("bc", TARGET)]
    assert spans("c", [], [TARGET]) == [("c", TARGET)]
    assert spans("", [], []) == []


def test_a_trace_has_the_text_of_every_round(tmp_path):
    recorder = Trace(tmp_path / "trace.json")
    events = streamed(["cold", "hit", "miss"], recorder.engine("ssd"))
    recorder.write()
    trace_events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = [row for event in trace_events for row in event["args"].get("rows", [event["args"]])]
    found = [tuple(span) for row in rows for span in row.get("spans", ())]
    assert found == [span for event in events for span in event.spans]


def test_text_beyond_the_limit_of_a_trace_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("ssd_jax.engine.rounds.trace.MAX_BYTES", 1200)
    recorder = Trace(tmp_path / "trace.json")
    streamed(["hit"] * 9, recorder.engine("ssd"))
    recorder.write()
    assert (tmp_path / "trace.json").stat().st_size < 1600
