"""Without a drafter a round is dispatched before the one in front of it is read."""

import numpy as np
import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters
from tests.engine.letters import EOS, LONG, drain, ids, outputs, request, spell
from tests.fakes.instrument import At, instrument


def make(script, *, drafter=None, fails_at=0, **settings):
    """A target whose calls contain the reads, and an engine."""
    target = FakeTarget(script, **settings)
    instrument(
        target,
        note={"read": target.calls},
        fail={"read": At(fails_at, RuntimeError("out of order"))},
    )
    return target, Engine(target, Letters, frozenset({EOS}), drafter=drafter, clock=Clock())


def test_the_next_round_is_dispatched_before_a_round_is_read():
    target, engine = make(spell(LONG))
    engine.add(request(max_tokens=5))
    assert outputs(drain(engine))[0].token_ids == ids(LONG[:5])
    ahead = ["forward", "read"] * 3  # the last round has nothing behind it
    assert target.calls == ["prefill", "read", "forward", *ahead, "read"]


def test_tokens_of_the_round_past_a_stop_are_dropped():
    target, engine = make(spell("abc"))
    engine.add(request())
    assert outputs(drain(engine))[0].token_ids == [*ids("abc"), EOS]
    assert target.calls.count("forward") == 4
    engine.add(request())
    assert outputs(drain(engine))[1].text == "abc"


@pytest.mark.parametrize("slots", [1, 2])
def test_a_round_has_no_row_that_was_to_end_before_it(slots):
    target, engine = make(spell(LONG), slots=slots, context=8)
    live = []
    note = {"forward": lambda _, lengths, *__: live.append(np.flatnonzero(lengths >= 0))}
    instrument(target, note=note)
    for length in (3, 5):
        engine.add(request(max_tokens=length))
    drain(engine)
    if slots == 2:
        assert [rows.tolist() for rows in live if 0 in rows] == [[0], [0, 1]]
    assert sum(map(len, live)) == 2 + 4


def test_with_a_drafter_each_round_is_read_before_the_next():
    target, engine = make(spell(LONG), drafter=FakeDrafter(spell(LONG)))
    engine.add(request(max_tokens=20))
    drain(engine)
    rounds = ["forward", "read"] * target.calls.count("forward")
    assert target.calls == ["prefill", "read", *rounds]


def test_a_request_enters_a_free_slot_at_the_next_step():
    target, engine = make(spell(LONG))
    engine.add(request(max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.add(request())
    before = len(target.calls)
    engine.step()
    assert target.calls[before:] == ["read", "prefill", "forward"]


def test_a_prompt_of_many_chunks_is_not_held_up_by_those_who_run():
    target, engine = make(spell(LONG), max_chunk=2)
    engine.add(request(max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.add(request([66] * 9))
    before = len(target.calls)
    for _ in range(5):
        engine.step()
    assert target.calls[before:] == ["read", "prefill", "forward"] * 5


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5])
def test_an_outcome_that_could_not_be_read_is_read_again(fails_at):
    """Another round may be on its way by then."""
    target, engine = make(spell(LONG), fails_at=fails_at)
    engine.add(request())
    with pytest.raises(RuntimeError, match="out of order"):
        drain(engine)
    assert outputs(drain(engine))[0].text == LONG
    assert target.calls.count("forward") <= len(LONG) + 2


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_come_end_and_go_at_any_time_have_their_own_texts(seed):
    rng = np.random.default_rng(seed)
    _, engine = make(spell(LONG), slots=3, context=80)
    wanted, done = {}, {}
    while len(wanted) < 30 or engine.has_work:
        if rng.random() < 0.2 and len(wanted) < 30:
            stop, length = str(rng.choice(["", *LONG])), int(rng.integers(1, 60))
            prompt = [65] * int(rng.integers(1, 20))
            number = engine.add(request(prompt, max_tokens=length, stop=stop or ()))
            wanted[number] = (LONG.split(stop)[0] if stop else LONG)[:length]
        for number in wanted:
            if number not in done and rng.random() < 0.01:
                engine.cancel(number)
        done |= outputs(engine.step())
    cancelled = [done[number].finish_reason == "cancelled" for number in wanted]
    assert 0 < sum(cancelled) < 20
    for gone, (number, text) in zip(cancelled, wanted.items(), strict=True):
        assert done[number].text == text[: len(done[number].text) if gone else None]
