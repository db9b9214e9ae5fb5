"""Which rounds show what a round takes."""

import itertools

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.rounds.timer import RoundTimer
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget, Silent
from tests.fakes.device import run_beside_host
from tests.fakes.watch import Watch

SLOTS, CONTEXT = 2, 256


def script(prompt, position):
    return 40 + position % 7


def started(k, requests, tokens=20):
    """An engine whose programs take a second, its target, its clock, and the rounds timed."""
    watch, seen = Watch(), []
    target = FakeTarget(script, slots=SLOTS, context=CONTEXT, max_chunk=4)
    run_beside_host(target, watch)
    drafter = FakeDrafter(script, k=k, slots=SLOTS, wrong=lambda position: True) if k else None
    engine = Engine(
        target,
        Silent,
        frozenset(),
        drafter=drafter,
        clock=watch,
        timer=RoundTimer(seen.append, least=SLOTS),
    )
    for index in range(requests):
        engine.add(request(index, tokens))
    return engine, target, watch, seen


def request(index=0, tokens=20, prompt=3):
    return Request(prompt_ids=[9] * prompt, params=SamplingParams(max_tokens=tokens), index=index)


def steps(engine, most=10**6):
    for _ in itertools.takewhile(lambda _: engine.has_work, range(most)):
        engine.step()


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_are_timed_from_outcome_to_outcome(k):
    engine, *_, seen = started(k, SLOTS)
    steps(engine)
    assert len(seen) >= 15
    assert {seen_round.seconds for seen_round in seen} == {1.0}
    assert {seen_round.proposed for seen_round in seen} == {k} or k
    assert not any(seen_round.missed for seen_round in seen)


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_with_a_free_slot_are_left_out(k):
    engine, *_, seen = started(k, SLOTS - 1)
    steps(engine)
    assert seen == []


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_that_the_caller_came_late_for_are_left_out(k):
    engine, _, watch, seen = started(k, SLOTS)
    for _ in range(8):
        engine.step()
        watch.now += 2.0
    assert seen == []
    steps(engine)
    assert seen


def test_rounds_with_a_prompt_between_are_left_out():
    """A long prompt is read in chunks between the rounds of another text."""
    engine, target, _, seen = started(3, SLOTS - 1, tokens=60)
    steps(engine, 4)
    engine.add(request(1, 30, prompt=40))
    prompts = target.calls.count("prefill")
    while target.calls.count("prefill") < prompts + 10:
        engine.step()
    assert seen == []
    steps(engine)
    assert seen


def test_only_a_round_that_follows_one_of_the_same_rows_is_timed():
    """Else it began with something else: the first rounds of a text wait for others."""
    seen = []
    timer = RoundTimer(seen.append, least=SLOTS)
    for now, requests in enumerate([(0, 1), (0, 2), (0, 2), (), (0, 2)]):
        timer.read(requests, None, float(now), reach=3, batch=4)
    assert [seen_round.seconds for seen_round in seen] == [1.0]
    assert (seen[0].rows, seen[0].reach, seen[0].batch) == (2, 3, 4)
