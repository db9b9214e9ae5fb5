"""Whatever a worker does, the text is the same; counters say what happened."""

from __future__ import annotations

import threading
import time

import msgspec
import numpy as np
import pytest

from ssd_jax.placement.process import server
from ssd_jax.placement.process.client import RemoteBranches
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.speculation.pace import Pace
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import BranchMessage
from ssd_jax.wire.refusals import Refusals
from tests.fakes.instrument import instrument
from tests.fakes.paces import Hasty, Moody, Patient
from tests.placement.process import serving
from tests.placement.process.conversation import OPEN, PREFILL, RECORDS
from tests.placement.process.script import HELLO, K, Q, ScriptedDraft, drafting
from tests.placement.process.scripted import only_misses, request, text
from tests.placement.process.serving import rogue, served
from tests.placement.process.stuck import stuck


@pytest.mark.parametrize("backup", ["none", "ngram", "random", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_worker_in_good_health_misses_nothing_but_what_it_did_not_prepare(backup, temperature):
    with served(backup=backup) as run:
        causes = run.generate(count=5, size=100, temperature=temperature)
        assert set(causes) == {"miss"}
        assert {*run.draft.counters} <= {"connections", "overtaken"}
        assert run.draft.counters["connections"] == 1
        lengths = np.concatenate([drafted.lengths for drafted, _ in run.target.verified])
        assert lengths.max() == K
        (session,) = run.sessions
        did = session.counters
        assert did["stale"] == 0
        assert did["cut"] <= causes["miss"]  # nothing more is made of a missed expansion
        assert did["rounds"] < did["forwards"] <= K * did["rounds"]
        assert "q late" not in run.draft.counters


@pytest.mark.parametrize(
    ("backup", "rule"), [("none", "ratio"), ("draft", "ratio"), ("draft", "block")]
)
def test_sampled_rows_are_verified_with_the_q_of_the_draft_and_greedy_ones_without(
    monkeypatch, backup, rule
):
    hello = drafting(HELLO, rule=rule)
    monkeypatch.setattr(serving, "HELLO", hello)
    with served(backup=backup, hello=hello) as run:
        for temperature in (0.0, 1.0):
            run.target.verified.clear()
            run.generate(count=1, temperature=temperature)
            seen = set()
            for drafted, proposal in run.target.verified:
                for place in range(drafted.lengths[0]):
                    seen.add((drafted.sources[0], *proposal.q[0, place].tolist()))
            kinds = ["hit", "miss"] if backup == "draft" else ["hit"]
            q = Q if temperature else (1.0, 0.0)
            assert seen == {(kind, *q) for kind in kinds}


@pytest.mark.parametrize(
    ("call", "at", "backup"), [("branch_off", 5, "none"), ("draft", 2, "draft")]
)
def test_a_late_worker_is_not_asked_again_and_catches_up_when_it_answers(call, at, backup):
    go = threading.Event()
    with served(draft=stuck(go, call, at), patience=2.0, backup=backup) as run:
        causes = run.generate()
        assert causes["late"] in (1, 2)  # one round, of up to two rows
        assert causes["stale"] > 10
        before = run.draft.counters.copy()
        assert before["late"] == 1
        go.set()
        run.until(only_misses)
        assert run.draft.counters["late"] == 1
        assert run.draft.counters["connections"] == 1


def slow_to_grow():
    """A draft whose grown branches take their time to come, as from a device."""
    draft = ScriptedDraft()
    return instrument(draft, delay={"branch_tokens": lambda *_: 0.05 * (draft.forwards > 1)})


def unfinished(hello, draft, called):
    """A worker whose branches do not grow before the next round has come."""

    def grows_later():
        slow = draft()

        def wait(*_):
            end = time.monotonic() + 10
            while slow.forwards > 1 and not called() and time.monotonic() < end:
                time.sleep(1e-3)

        return instrument(slow, note={"branch_tokens": wait})

    return DraftSession(hello, grows_later, called)


def lengths_of_hits(run):
    return [int(d.lengths[0]) for d, _ in run.target.verified if d.sources[0] == "hit"]


def test_a_branch_that_is_not_finished_is_served_as_it_is():
    with served(unfinished, patience=0.25) as run:
        run.until(lambda _: lengths_of_hits(run), count=1, size=8)
        assert max(lengths_of_hits(run)) < K
        assert run.draft.counters["connections"] == 1


def listening(hello, draft, called):
    """A worker that gives its engine the time to answer before it looks for another round."""
    return DraftSession(hello, draft, lambda: bool(time.sleep(0.02)) or called())


def test_a_branch_that_was_hit_is_waited_for_as_long_as_that_pays():
    """Without waiting, the worker is called away from the other forwards at once."""
    lengths, cut = {}, {}
    for pace in (Patient(), Hasty(), Moody()):
        worker, draft = listening, slow_to_grow
        if isinstance(pace, Hasty):
            worker, draft = unfinished, ScriptedDraft
        with served(worker, draft=draft, pace=pace) as run:
            run.generate(count=1, size=40)
            hits = lengths_of_hits(run)
            lengths[type(pace)] = {*hits[:-1]}  # the end of the text leaves less room
            cut[type(pace)] = run.sessions[0].counters["cut"]
            assert "late" not in run.draft.counters
    assert lengths[Patient] == {K - 1, K}
    assert lengths[Hasty] <= {0, 1}
    assert {0, 1, K - 1} <= lengths[Moody]
    assert cut[Hasty] > cut[Patient]  # where nothing was hit, nothing more is made


@pytest.mark.parametrize("pace", [Hasty, Moody, Pace])
def test_the_backup_auto_drafts_just_in_time_as_long_as_that_pays(pace):
    with served(backup="auto", pace=pace()) as run:
        run.generate(count=4, size=100)
        drafted = {
            int(d.lengths[slot])
            for d, _ in run.target.verified
            for slot, source in d.sources.items()
            if source == "miss"
        }
        assert (drafted == {0}) == (pace is Hasty)


def replay(answer, sent):
    return [*sent[-3:], answer, answer]


LIE = 9


def lie_again(answer, sent):
    """The answer, and then another to the same round."""
    if isinstance(answer, BranchMessage) and answer.complete:
        return [answer, msgspec.structs.replace(answer, tokens=answer.tokens * 0 + LIE)]
    return [answer]


def of_another_request(answer, sent):
    if isinstance(answer, BranchMessage):
        other = msgspec.structs.replace(answer, epochs=answer.epochs - 1, complete=False)
        return [other, answer]
    return [answer]


@pytest.mark.parametrize("change", [replay, lie_again, of_another_request])
def test_stale_and_replayed_answers_are_ignored(change, monkeypatch):
    with served(rogue(change)) as run:
        branches = RemoteBranches.branches

        def after_all(answer, forwards, until=None):
            time.sleep(0.005)  # whatever was said twice has come
            return branches(answer, forwards, until)

        monkeypatch.setattr(RemoteBranches, "branches", after_all)
        causes = run.generate(count=4)
        # Branches of another request are none of this one's: its cache then has nothing in it.
        assert {*causes} <= ({"miss", "cold"} if change is of_another_request else {"miss"})
        assert run.draft.counters["connections"] == 1
        if change is not of_another_request:
            assert run.draft.counters["ignored"] > 0
        for _, proposal in run.target.verified:
            assert LIE not in proposal.tokens


def test_speculations_for_an_earlier_request_of_a_slot_are_no_branches():
    def old(answer, sent):
        if isinstance(answer, BranchMessage):
            return [msgspec.structs.replace(answer, epochs=answer.epochs - 1)]
        return [answer]

    with served(rogue(old)) as run:
        causes = run.generate()
        assert set(causes) == {"cold"}


def test_only_a_round_calls_the_draft_away_from_its_branches():
    """A prompt that is prefilled meanwhile must not cost the others their branches."""
    inbox = server._Inbox(HELLO, Refusals())
    inbox.fill(iter([server.codec.encode(message) for message in (OPEN, PREFILL)]))
    assert not inbox.round_waits()
    inbox.fill(iter([server.codec.encode(RECORDS)]))
    assert inbox.round_waits()
    messages = inbox.messages(1.0)
    assert [type(next(messages)) for _ in range(2)] == [type(OPEN), type(PREFILL)]
    assert list(messages) == []  # the first of two streams has ended
    assert inbox.round_waits()
    assert type(next(inbox.messages(1.0))) is type(RECORDS)
    assert not inbox.round_waits()


def test_a_message_that_is_longer_than_any_of_use_ends_its_stream():
    """Once it is known what the engine wants: before, only its first message is read."""
    inbox = server._Inbox(HELLO, Refusals())
    most = server.message_size(HELLO)
    inbox.fill(iter([bytes(most + 1)]))
    with pytest.raises(ProtocolError, match=f"a message of {most + 1} bytes, of {most} at most"):
        next(inbox.messages(1.0))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("model", msgspec.structs.replace(HELLO, model="another")),
        ("context", msgspec.structs.replace(HELLO, context=HELLO.context + 1)),
        ("budgets", msgspec.structs.replace(HELLO, budgets=(7,))),
        ("k", drafting(HELLO, k=K + 1)),
        ("support", drafting(HELLO, support=3)),
        ("rule", drafting(HELLO, rule="coupled")),
        ("predict", drafting(HELLO, predict="noise")),
    ],
)
def test_a_worker_refuses_an_engine_that_expects_another(field, other):
    with served(hello=other) as run:
        assert f"the worker's {field} is another" in run.draft.streams.trouble


def test_a_worker_refuses_an_engine_that_does_not_know_its_token():
    with served(token="another") as run:
        assert run.draft.streams.refused
        assert "its token is another" in run.draft.streams.trouble


@pytest.mark.parametrize("backup", ["none", "draft"])
def test_arrivals_and_cancels_in_the_middle_change_no_ones_text(backup):
    with served(backup=backup) as run:
        running, done = {}, []
        for step in range(400):
            if step % 3 == 0:
                number = run.engine.add(request(step, max_tokens=20 + step % 30))
                running[number] = text(20 + step % 30)
            if step % 7 == 5:
                run.engine.cancel(max(running))  # it waits, or runs, or has only begun
            for event in run.engine.step():
                if event.output is not None:
                    expected = running.pop(event.request_id)
                    done.append(event.output.finish_reason)
                    found = event.output.token_ids
                    assert found == expected[: len(found)]
                    assert event.output.finish_reason == "cancelled" or found == expected
        assert min(done.count("length"), done.count("cancelled")) > 10
        assert run.draft.counters["connections"] == 1
        assert run.draft.streams.trouble == ""
