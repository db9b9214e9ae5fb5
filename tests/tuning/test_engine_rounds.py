"""Rounds of mode sd that are run to be timed."""

import numpy as np
import pytest

from ssd_jax.testing.fakes import FakeDrafter, FakeTarget
from ssd_jax.tuning.engine_rounds import EngineRounds
from tests.fakes.device import run_beside_host
from tests.fakes.instrument import instrument
from tests.fakes.watch import Watch

SLOTS, K = 3, 4


def script(prompt, position):
    return 40 + position % 7


def slow_drafter(watch, delay=None, **settings):
    """Takes 0.2 s for each token that is asked for."""
    delay = {"propose": lambda batch: 0.2 * batch.limit.max()} | (delay or {})
    drafter = FakeDrafter(script, k=K, slots=SLOTS, **settings)
    return instrument(drafter, delay=delay, watch=watch)


def rounds(watch, *, context=64, max_chunk=4, **of_drafter):
    """Rounds whose forwards take 1 s, and a tenth for each token that they verify; the lengths of
    what was verified."""
    verified = []

    def forward(_tokens, _lengths, drafted=None):
        verified.append([] if drafted is None else drafted.lengths.tolist())
        return 1.0 + 0.1 * max(verified[-1], default=0)

    target = FakeTarget(script, slots=SLOTS, context=context, max_chunk=max_chunk)
    instrument(target, delay={"forward": forward}, watch=watch)
    engine = EngineRounds(target, slow_drafter(watch, **of_drafter), [[1] * 6] * SLOTS, clock=watch)
    return verified, engine


@pytest.mark.parametrize(
    "of_drafter",
    [{}, {"wrong": lambda position: True}, {"length": lambda position: position % 3}],
    ids=["accepted", "rejected", "short"],
)
def test_every_slot_verifies_exactly_k_tokens_in_every_round_that_counts(of_drafter):
    """Whatever is accepted, and however often texts end meanwhile."""
    watch = Watch()
    verified, engine = rounds(watch, **of_drafter)
    for k in (1, 4, 2) * 8:
        assert engine.begin(k)
        assert engine.run() == pytest.approx(0.2 * k + 1.0 + 0.1 * k)
        assert verified[-2:] == [[k] * SLOTS] * 2


def test_as_many_slots_as_are_asked_for_have_texts():
    watch = Watch()
    verified, engine = rounds(watch)
    for rows in (1, SLOTS, 2):
        engine.rows = rows
        assert engine.begin(K)
        assert engine.run() == pytest.approx(0.2 * K + 1.0 + 0.1 * K)
        assert verified[-1] == [K] * rows + [0] * (SLOTS - rows)


@pytest.mark.parametrize("branches", [False, True])
def test_a_draft_that_could_branch_drafts_just_in_time(branches):
    watch = Watch()
    drafter, seen = slow_drafter(watch), []
    drafter.branches = branches
    instrument(drafter, note={"propose": lambda batch: seen.append(batch.branches.tolist())})
    engine = EngineRounds(FakeTarget(script, slots=SLOTS, context=64), drafter, [[1] * 6] * SLOTS)
    assert engine.begin(K)
    engine.run()
    assert seen[-1] == [not branches] * SLOTS


def test_a_proposal_is_timed_until_it_is_there():
    watch = Watch()
    _, engine = rounds(watch)
    assert engine.begin(K, 1)
    assert engine.draft() == pytest.approx(0.2 * K)


def test_a_context_without_room_for_rounds_of_k_is_said_to_have_none():
    _, engine = rounds(Watch(), context=16, max_chunk=32)
    assert not engine.begin(K, 2)
    assert engine.begin(1, 2)


def test_slots_that_never_all_have_a_text_are_not_waited_for():
    """As where the pages do not suffice for all of them at once."""
    watch = Watch()
    verified, engine = rounds(watch)
    engine._engine._seats.offer = lambda: None
    assert not engine.begin(K, 2)
    assert np.size(verified) == 0


@pytest.mark.parametrize("delays", [(), (0.6,), (5.0,), (0.0, 0.6), (5.0, 5.0, 0.6)])
def test_a_step_whose_end_is_delayed_makes_no_round_look_short(delays):
    """The program that it dispatched goes on meanwhile."""
    watch, left = Watch(), []
    target = run_beside_host(FakeTarget(script, slots=SLOTS), watch)
    drafter = slow_drafter(watch, {"speculate": lambda: left.pop(0) if left else 0.0})
    engine = EngineRounds(target, drafter, [[1] * 6] * SLOTS, clock=watch)
    assert engine.begin(2)
    left += delays
    assert engine.run() == pytest.approx(1.0 + 0.2 * 2)
