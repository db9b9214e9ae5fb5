"""What every trace file must have."""

from __future__ import annotations

import itertools
import math

from ssd_jax.engine.rounds.trace import LANES, OF_A_WORKER


def slices(document, lane):
    """(name, begin, end) in seconds."""
    return [
        (event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["tid"] == LANES[lane]
    ]


def check_schema(document):
    """What viewers ask of the format, and this program of its own files."""
    assert set(document) == {"traceEvents", "otherData"}
    assert document["otherData"]["producer"] == "ssd_jax"
    processes = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert set(event) == {"ph", "pid", "tid", "name", "args"}
            assert event["name"] in ("process_name", "thread_name")
            processes |= {event["pid"]} if event["name"] == "process_name" else set()
            continue
        assert set(event) == {"ph", "pid", "tid", "name", "ts", "dur", "args"}
        assert event["pid"] in processes
        assert event["tid"] % OF_A_WORKER in LANES.values()
        assert math.isfinite(event["ts"])
        assert 0 <= event["dur"] < math.inf
    for lane in LANES:  # slices of a lane do not overlap, else viewers nest or drop them
        ordered = sorted((begin, end) for _, begin, end in slices(document, lane))
        assert all(one[1] <= two[0] + 1e-6 for one, two in itertools.pairwise(ordered))
