"""The trace of scripted rounds: what is in the file, and that it is whole or not there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.metrics import prepared_bonus
from ssd_jax.engine.rounds import trace
from ssd_jax.engine.rounds.trace import RowTrace, Trace
from ssd_jax.errors import InputError
from ssd_jax.roles.activity import Busy
from ssd_jax.roles.records import CacheLookup
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import Clock, FakeTarget, Silent
from ssd_jax.tools.traces.read import read_trace
from tests.engine.letters import EOS, drain, request, spell
from tests.engine.rounds.trace_schema import check_schema, slices
from tests.fakes.activities import ACTIVITIES, LOOK, Script
from tests.sampling.edits import Edit, edited


def traced(path, **settings):
    """The trace of a request of five tokens, rounds and times as in `test_activity`."""
    recorder = Trace(path, zero=0.0, **settings)
    script = Script(ACTIVITIES, ("cold", "hit", "miss"), (LOOK,) * 3)
    engine = Engine(
        script,
        Silent,
        frozenset(),
        drafter=script,
        clock=script.clock,
        trace=recorder.engine("ssd k=1"),
    )
    engine.add(Request(prompt_ids=[1, 2], params=SamplingParams(max_tokens=5), index=0))
    while engine.has_work:
        engine.step()
    return recorder


def written(path, **settings):
    traced(path, **settings).write()
    return json.loads(path.read_text())


def test_target_and_draft_have_their_slices_in_the_engines_time(tmp_path):
    document = written(tmp_path / "trace.json")
    check_schema(document)
    assert slices(document, "target") == [
        ("prefill", 0, 10),
        ("verify: cold", 12, 22),
        ("verify: hit", 24, 34),
        ("verify: miss", 36, 46),
        ("forward", 46, 56),
    ]
    assert slices(document, "draft") == [
        (span.kind, span.begin, span.end) for activity in ACTIVITIES for span in activity.spans
    ]
    host = {name: end - begin for name, begin, end in slices(document, "host") if end > begin}
    assert host == {"read": 10, "propose": 2}


def test_a_round_past_the_last_text_does_not_last_until_the_next_request(tmp_path):
    recorder, clock = Trace(tmp_path / "trace.json", zero=0.0), Clock()
    engine = Engine(
        FakeTarget(spell("abc")),
        Silent,
        frozenset({EOS}),
        clock=clock,
        trace=recorder.engine("ar"),
    )
    for _ in range(2):
        engine.add(request())
        drain(engine)
        clock.now += 1000
    recorder.write()
    (read,) = read_trace(tmp_path / "trace.json")
    assert [span.name for span in read.target] == ["prefill", *["forward"] * 3] * 2
    assert max(span.end - span.begin for span in read.target) < 1e5  # milliseconds


def test_a_round_says_of_each_slot_what_was_proposed_accepted_and_committed(tmp_path):
    document = written(tmp_path / "trace.json")
    args = [e["args"] for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert args[0] == {"request": 0, "tokens": 2}
    assert [arg["round"] for arg in args[1:]] == [0, 1, 2, 3]
    assert args[2]["rows"] == [
        {"slot": 0, "request": 0, "source": "hit", "L": 0, "k": 0, "tokens": [40]}
    ]


def test_a_round_says_what_branches_had_been_prepared_for(tmp_path):
    recorder = Trace(tmp_path / "trace.json", zero=0.0)
    ends, bonus = [[2, 3, 4]], np.array([[5, -1, 6, 7, -1]], np.int32)
    k, one = np.array([1], np.int32), np.array([0], np.int32)
    look = CacheLookup(one, k, one, one, np.zeros((1, 5), np.int32), bonus, ends)
    assert prepared_bonus(look, 0) == [[5], [6], [7]]
    assert prepared_bonus(look._replace(k=np.array([-1], np.int32)), 0) == []
    assert prepared_bonus(None, 0) == []
    engine = recorder.engine("ssd")
    engine.round((0.0, 1.0), [RowTrace(0, 0, "hit", 2, 1, [7], [[5], [6], [7]])])
    recorder.write()
    (read,) = read_trace(tmp_path / "trace.json")
    assert read.rounds[0].args["rows"][0]["prepared"] == [[5], [6], [7]]


def test_draft_slices_never_overlap_although_clocks_are_compared_again(tmp_path):
    recorder = Trace(tmp_path / "trace.json", zero=0.0)
    engine = recorder.engine("ssd")
    engine.draft([Busy("expand", 1.0, 2.0, [0])])
    engine.draft([Busy("grow", 1.9, 3.0, [0]), Busy("promote", 2.5, 2.9, [0])])
    recorder.write()
    document = json.loads((tmp_path / "trace.json").read_text())
    check_schema(document)
    assert slices(document, "draft")[1:] == [("grow", 2, 3), ("promote", 3, 3)]


def test_workers_that_share_the_work_have_lanes_of_their_own(tmp_path):
    recorder = Trace(tmp_path / "trace.json", zero=0.0)
    engine = recorder.engine("ssd")
    engine.draft([Busy("expand", 1.0, 2.0, [0]), Busy("expand", 1.5, 3.0, [0], worker=1)])
    engine.draft([Busy("grow", 2.0, 2.5, [0])])
    recorder.write()
    document = json.loads((tmp_path / "trace.json").read_text())
    check_schema(document)
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    lanes = {
        names[e["tid"]]: (e["ts"], e["dur"]) for e in document["traceEvents"] if e["ph"] == "X"
    }
    assert {"draft", "draft 2"} == {*lanes}
    assert lanes["draft 2"] == (1.5e6, 1.5e6)
    (read,) = read_trace(tmp_path / "trace.json")
    found = [[(span.begin, span.end) for span in worker] for worker in read.drafts]
    assert found == [[(1000, 2000), (2000, 2500)], [(1500, 3000)]]


def row(source, proposed=0):
    return RowTrace(0, 0, source, proposed, 0, [1])


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        ([], "discarded"),
        ([row(None)], "forward"),
        ([row(None), row(None, 3)], "verify"),
        ([row("late"), row("late"), row(None)], "verify: late"),
        ([row("hit"), row("miss"), row("hit")], "verify: 2 of 3 hit"),
    ],
)
def test_a_round_is_called_by_what_its_rows_found(rows, name):
    assert trace._name(rows) == name


def test_engines_are_processes_and_a_shared_device_says_so(tmp_path):
    recorder = Trace(tmp_path / "trace.json", zero=0.0)
    one, two = recorder.engine("ar"), recorder.engine("sd k=4", shared_device=True)
    one.round((1.0, 2.0), [row(None)])
    two.round((2.0, 3.0), [row(None, 2)])
    recorder.write()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert (titles[1, 0], titles[1, 1], titles[2, 0]) == ("ar", "target", "sd k=4")
    assert titles[2, 1] == "target and draft (one device)"
    assert [(e["pid"], e["name"]) for e in events if e["ph"] == "X"] == [
        (1, "forward"),
        (2, "verify"),
    ]


def test_a_trace_has_bounded_memory_and_counts_what_was_left_out(tmp_path):
    path = written(tmp_path / "whole.json")
    events = sum(event["ph"] == "X" for event in path["traceEvents"])
    part = written(tmp_path / "part.json", max_events=5)
    check_schema(part)
    assert sum(event["ph"] == "X" for event in part["traceEvents"]) == 5
    assert part["otherData"]["dropped"] == events - 5
    assert path["otherData"]["dropped"] == 0


def test_a_trace_of_any_number_of_slots_is_no_longer_than_its_reader_takes(tmp_path, monkeypatch):
    """Rows with the longest names and numbers that there may be."""
    most = 1 << 20
    monkeypatch.setattr(trace, "MAX_BYTES", most)
    recorder = Trace(tmp_path / "trace.json", zero=-1e7)
    engine = recorder.engine("ssd k=16")
    rows = [RowTrace(slot, 10**9 + slot, "stale", 16, 16, [199_999] * 17) for slot in range(64)]
    for number in range(200):
        engine.round((number, number + 0.5), rows)
        engine.draft([Busy("predict", number, number + 0.1, range(64))])
        engine.host("propose", number)
    recorder.write()
    assert 0.5 * most < recorder.path.stat().st_size <= most
    assert recorder._dropped
    (found,) = read_trace(recorder.path)
    assert [round_.args["round"] for round_ in found.rounds] == list(range(len(found.rounds)))


def test_a_trace_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    path.write_text("before")
    Trace(path).write()  # nothing was traced
    assert path.read_text() == "before"
    recorder = traced(path)

    def full(*_arguments, **_more):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(trace.json, "dumps", full)
        with pytest.raises(OSError, match="no space"):
            recorder.write()
        recorder.write_at_the_end()  # nobody is left to be told
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    recorder.write()
    check_schema(json.loads(path.read_text()))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.more
def test_a_full_disk_costs_the_trace_alone(tiny_checkpoint, tmp_path):
    """No file may grow beyond 4 KB there."""
    path = tmp_path / "trace.json"

    def run(kilobytes, *flags):
        shell = ["bash", "-c", f'ulimit -f {kilobytes} && exec "$@"', "bash"]
        command = [sys.executable, "-m", "ssd_jax", "generate", f"--target={tiny_checkpoint}"]
        common = ["--prompt=abc", "--max_tokens=60", "--ignore_eos", "--compile_cache=off"]
        return subprocess.run([*shell, *command, *common, *flags], capture_output=True, text=True)

    found = run(4, f"--trace={path}")
    assert found.stdout == run("unlimited").stdout
    assert found.stdout
    assert f"{path}: the trace was not written: File too large" in found.stderr
    assert found.returncode
    assert list(tmp_path.iterdir()) == []


def test_a_trace_path_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="is a directory; give a file"):
        Trace(tmp_path)
    with pytest.raises(InputError, match=r"no directory .*make it first"):
        Trace(tmp_path / "none" / "trace.json")
    with pytest.raises(InputError, match="is a device or a pipe"):
        Trace("/dev/null")  # a trace moves into its place, and would take this one's

    def denied(**_arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", denied)
    with pytest.raises(InputError, match="cannot be written: Permission denied"):
        Trace(tmp_path / "trace.json")


def test_a_traces_path_is_relative_to_the_directory_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recorders = traced("here.json"), traced("~/home.json")
    monkeypatch.chdir("elsewhere")
    for recorder in recorders:
        recorder.write()
    assert {path.name for path in tmp_path.glob("*.json")} == {"here.json", "home.json"}
    with pytest.raises(InputError, match="no path has"):
        Trace("a\0b")


def test_without_a_trace_the_clock_is_read_no_more_often():
    """Off costs nothing: no looks at the clock beyond those of the metrics."""

    def looks(**settings):
        script = Script((None,) * 3, ("hit",) * 3, (LOOK,) * 3)
        count = 0

        def clock():
            nonlocal count
            count += 1
            return script.now

        engine = Engine(script, Silent, frozenset(), drafter=script, clock=clock, **settings)
        engine.add(Request(prompt_ids=[1], params=SamplingParams(max_tokens=5), index=0))
        while engine.has_work:
            engine.step()
        return count

    # An arrival, and a dispatch and a read of each of five programs.
    assert looks() == 1 + 2 * 5


FLAWS = {
    "the first row speaks for all": Edit(trace, "_name", "len(set(sources)) == 1", "sources"),
    "proposals without a look-up are none": Edit(trace, "_name", "row.L for", "row.source for"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_a_trace_are_caught(flaw):
    with edited([FLAWS[flaw]]), pytest.raises(AssertionError):
        names_of_rounds()


def names_of_rounds():
    (mark,) = test_a_round_is_called_by_what_its_rows_found.pytestmark
    for rows, name in mark.args[1]:
        test_a_round_is_called_by_what_its_rows_found(rows, name)
