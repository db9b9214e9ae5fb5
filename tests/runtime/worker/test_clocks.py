"""A worker whose clock shows another time, and what it was busy with by the engine's clock."""

from __future__ import annotations

import dataclasses
import functools
import time

import pytest
from ssd_jax.placement.process.clocks import ClockOffset

from ssd_jax.placement.process import clocks
from ssd_jax.placement.process.messages import ProtocolError, Speculations, Stats, Winner, Work
from ssd_jax.placement.process.session import Session
from tests.runtime.worker.scripted import HELLO, K, ScriptedDraft
from tests.runtime.worker.test_codec import SPECULATIONS, WINNER
from tests.runtime.worker.test_faults import rogue, served
from tests.runtime.worker.test_session import MOVE, OPEN, PREFILL, ROUND, Talk

AHEAD = 5000.0


def answered(*samples):
    """An offset after (sent, received, the worker's clock)."""
    offset = ClockOffset()
    for number, (sent, received, theirs) in enumerate(samples):
        offset.asked(number, sent)
        offset.answered(number, theirs, received)
    return offset


def test_the_offset_is_right_up_to_half_the_round_trip():
    # The answer was written 0.1 s after the question, it took 0.3 s to come back.
    offset = answered((10.0, 10.4, AHEAD + 10.1))
    assert abs(offset.ours(AHEAD + 20) - 20) <= offset.error(10.4) == pytest.approx(0.2)


def test_the_fastest_round_trip_counts_until_drift_has_made_it_worse():
    slow, fast = (10.0, 12.0, AHEAD + 10.0), (20.0, 20.002, AHEAD + 20.001)
    for samples in ((slow, fast), (fast, (30.0, 32.0, AHEAD + 30.0))):
        assert answered(*samples).ours(AHEAD + 40) == pytest.approx(40)
    much_later = 20.0 + 1.0 / clocks._DRIFT
    moved = answered(fast, (much_later, much_later + 1, AHEAD + 3 + much_later + 0.5))
    assert moved.ours(AHEAD + 3 + much_later) == pytest.approx(much_later)


def test_nothing_is_known_before_an_answer_or_from_one_to_another_question():
    offset = ClockOffset()
    assert offset.ours(AHEAD) is None
    offset.asked(1, 0.0)
    offset.answered(2, AHEAD, 0.1)
    assert offset.ours(AHEAD) is None


def test_some_questions_come_at_once_and_later_ones_wait_for_answers():
    offset, now = ClockOffset(), 7.0
    for number in range(4):
        assert offset.due(now)
        offset.asked(number, now)
    assert not offset.due(now + 2 * clocks.EVERY)
    for number in range(4):
        offset.answered(number, AHEAD, now + 1)
    assert not offset.due(now + clocks.EVERY / 2)
    assert offset.due(now + clocks.EVERY)


class Ticking:
    """A clock that shows one more at each look."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def work_of(*messages):
    talk = Talk()
    talk.session = Session(HELLO, ScriptedDraft, lambda: False, clock=Ticking())
    return [answer.work for answer in talk.say(HELLO, OPEN, *messages)[1:]]


def test_a_session_tells_of_its_work_piece_by_piece():
    # Looks at the clock: prefill 1, 2; round 3, move 4, after each forward 5, 6, 7.
    assert work_of(PREFILL, ROUND) == [
        (Work(what="prefill", begin=1, end=2), Work(what="expand", begin=4, end=5)),
        (Work(what="grow", begin=5, end=6),),
        (Work(what="grow", begin=6, end=7),),
    ]
    move = dataclasses.replace(MOVE, draft=2)
    drafted = dataclasses.replace(ROUND, moves=(move,), expand=None)
    assert work_of(PREFILL, drafted)[0][1] == Work(what="draft", begin=4, end=5)


def span(**changes):
    return dataclasses.replace(Work(what="grow", begin=1.0, end=2.0), **changes)


NONE = float("nan")
IMPOSSIBLE = [
    (span(begin=NONE),),
    (span(end=NONE),),
    (span(end=float("inf")),),
    (span(begin=-1.0),),
    (span(begin=2.5),),
    (span(begin=1e11, end=1e11),),
    (span(), span(begin=1.5)),
    (span(what="sleep"),),
    (span(begin=0.0, end=0.0),) * 257,
]


@pytest.mark.parametrize("work", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
@pytest.mark.parametrize("kind", [Speculations, Winner])
def test_times_that_cannot_be_are_refused(kind, work):
    message = {Speculations: SPECULATIONS, Winner: WINNER}[kind]
    about = dataclasses.replace(HELLO, k=3, branches=2, support=4, slots=4, tokens=2**31)
    dataclasses.replace(message, work=(span(), span(begin=2.0))).check(about)
    with pytest.raises(ProtocolError):
        dataclasses.replace(message, work=work).check(about)


@pytest.mark.parametrize(
    "changes",
    [{"clock": NONE}, {"clock": -1.0}, {"clock": 1e11}, {"busy": NONE}, {"stale": -1}],
    ids=str,
)
def test_figures_that_cannot_be_are_refused(changes):
    stats = Stats(number=1, rounds=2, forwards=3, cut=4, stale=5, busy=0.5, clock=1e5)
    stats.check()
    with pytest.raises(ProtocolError):
        dataclasses.replace(stats, **changes).check()


def ahead():
    return time.perf_counter() + AHEAD


def spans_of(session=Session):
    """What a worker whose clock is ahead did in three requests: spans by our clock."""
    seen = []
    with served(functools.partial(session, clock=ahead)) as run:
        told = run.draft.activity

        def activity():
            seen.append((told(), time.perf_counter()))
            return seen[-1][0]

        run.engine._drafter._activity = activity
        assert run.draft.stats(30) is not None  # so the clocks are known
        began = time.perf_counter()
        run.generate(count=3)
        assert run.draft.counters["connections"] == 1
        return began, seen, run.draft._connection._offset.error(time.perf_counter())


def begun_rounds(spans):
    return [each for each in spans if each.what == "expand"]


def test_work_is_told_in_the_engines_time_whatever_the_workers_clock_shows():
    began, seen, error = spans_of()
    assert error < 0.5
    last = began
    for activity, now in seen:
        for what, begin, end, _ in activity.spans:
            assert last - error <= begin <= end <= now
            assert what in ("prefill", "promote", "expand", "grow")
            last = max(last, begin)
    spans = [each for activity, _ in seen for each in activity.spans]
    assert len(spans) > 3 * K
    assert {slot for each in spans for slot in each.slots} == {0, 1}
    assert sum(activity.bytes for activity, _ in seen) > 100 * len(begun_rounds(spans))


def test_a_worker_that_works_in_the_future_or_lies_twice_spoils_figures_alone():
    def later(answer, said):
        if isinstance(answer, Stats):
            return [dataclasses.replace(answer, clock=answer.clock - 1000)]
        return [answer]

    _, seen, _ = spans_of(rogue(later))
    for activity, now in seen:
        assert all(begin <= end <= now for _, begin, end, _ in activity.spans)
    _, seen, _ = spans_of(rogue(lambda answer, said: [answer, answer]))
    begins = [each.begin for activity, _ in seen for each in activity.spans]
    assert len(set(begins)) == len(begins)


def test_work_for_an_earlier_request_is_nobodys():
    with served() as run:
        assert run.draft.stats(30) is not None
        run.generate(count=1)
        run.draft.activity()
        link, epochs = run.draft._connection, {0: run.draft._slots[0].epoch}
        for current in (True, False):
            link._work.append((span(), 9e9, dict(epochs)))
            (one,) = link.activity(epochs if current else {0: epochs[0] + 1}).spans
            assert list(one.slots) == [0] * current
