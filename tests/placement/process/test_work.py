"""What a worker was busy with, on the clock that all processes of a host have in common."""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace

import numpy as np
from msgspec.structs import replace

from ssd_jax.placement.process.session import DraftSession
from ssd_jax.roles.activity import WORK, Busy
from ssd_jax.wire.messages import Work
from tests.placement.process.conversation import OPEN, PREFILL, RECORDS, ROUND, Talk, rows
from tests.placement.process.script import HELLO, K
from tests.placement.process.serving import rogue, served
from tests.placement.process.supervised import linux, working


class Ticking:
    """A clock that shows one more at each look."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def work_of(*messages):
    session = functools.partial(DraftSession, clock=Ticking())
    talk = Talk(HELLO, OPEN, *messages, session=session)
    return [answer.work for answer in talk.answers[1:]]


def test_a_session_tells_of_its_work_piece_by_piece():
    # Looks at the clock: prefill 1, 2; the records come 3, promotion 4; the expansion comes 5 and
    # begins 6; after each forward 7, 9, 11, and when that is sent.
    assert work_of(PREFILL, *ROUND) == [
        (Work("prefill", 1, 2), Work("expand", 6, 7)),
        (Work("grow", 7, 9),),
        (Work("grow", 9, 11),),
    ]
    drafted = replace(RECORDS, drafts=rows(2))
    assert work_of(PREFILL, drafted)[0][1] == Work("draft", 4, 5)


def rounds_of(run):
    """Completes three requests; their rounds as (began, what the worker did, ended)."""
    found, measured = [], run.draft.activity
    began = time.perf_counter()

    def activity():
        nonlocal began
        found.append((began, measured(), time.perf_counter()))
        return found[-1][1]

    run.draft.activity = activity
    run.generate(count=3)
    assert run.draft.counters["connections"] == 1
    return found


def assert_within(rounds):
    """Each span begins and ends in the rounds so far, one after the other."""
    last = rounds[0][0]
    for _, activity, ended in rounds:
        for what, begin, end, *_ in activity.spans:
            assert last <= begin <= end <= ended
            assert what in WORK
            last = end


def test_the_work_of_a_worker_lies_within_the_rounds_of_its_engine():
    with served() as run:
        rounds = rounds_of(run)
    assert_within(rounds)
    spans = [span for _, activity, _ in rounds for span in activity.spans]
    assert len(spans) > 3 * K
    assert {slot for span in spans for slot in span.slots} == {0, 1}
    expanded = sum(span.kind == "expand" for span in spans)
    assert sum(activity.bytes for _, activity, _ in rounds) > 100 * expanded > 0


@linux
def test_a_worker_process_has_the_clock_of_its_engine():
    with working() as (_, run):
        rounds = rounds_of(run)
    assert_within(rounds)
    assert sum(len(activity.spans) for _, activity, _ in rounds) > 3 * K


def test_a_worker_that_works_in_the_future_or_lies_twice_spoils_figures_alone():
    def later(answer, sent):
        work = tuple(Work(span.kind, span.begin + 1e3, span.end + 1e3) for span in answer.work)
        return [replace(answer, work=work)]

    def unless_welcome(change):
        return rogue(lambda answer, sent: change(answer, sent) if sent else [answer])

    with served(unless_welcome(later)) as run:
        for _, activity, now in rounds_of(run):
            assert all(begin <= end <= now for _, begin, end, *_ in activity.spans)
    with served(unless_welcome(lambda answer, sent: [answer, answer])) as run:
        begins = [span.begin for _, done, _ in rounds_of(run) for span in done.spans]
        assert len(set(begins)) == len(begins)


def test_work_for_an_earlier_request_counts_for_no_request():
    with served() as run:
        run.generate(count=1)
        run.draft.activity()
        link, epochs = run.draft.streams.current, run.draft.epochs.copy()
        promotion = SimpleNamespace(slots=np.array([0]), epochs=epochs[:1])
        for current in (True, False):
            link._work._spans.append((Busy("grow", 1.0, 2.0), promotion))
            (one,) = link.activity(epochs if current else epochs + 1).spans
            assert list(one.slots) == [0] * current
