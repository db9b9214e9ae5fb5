"""Which rounds show what a round takes."""

import itertools

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.round_timer import RoundTimer
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import FakeDrafter, FakeTarget, Silent

SLOTS, CONTEXT = 2, 256


def script(prompt, position):
    return 40 + position % 7


class Outcome:
    """An outcome that takes a second, unless it was there already."""

    def __init__(self, target, found):
        self.target, self.found, self.bonus = target, found, found.bonus

    def ready(self):
        return self.target.late

    def read(self):
        self.target.now += 1.0
        return self.found.read()


class Target(FakeTarget):
    """Programs take a second of the clock; with `late` the caller comes after they have ended."""

    def __init__(self):
        super().__init__(script, slots=SLOTS, context=CONTEXT, max_chunk=4)
        self.now, self.late = 0.0, False

    def accept(self, logits, proposal=None):
        return Outcome(self, super().accept(logits, proposal))

    def forward(self, tokens, lengths, drafted=None):
        tokens = tokens.copy() if hasattr(tokens, "copy") else tokens
        return super().forward(tokens, lengths, drafted)

    def prefill_last(self, slot, tokens, offset):
        return Outcome(self, super().prefill_last(slot, tokens, offset))


def started(k, requests, tokens=20):
    target, seen = Target(), []
    drafter = FakeDrafter(script, k=k, slots=SLOTS, wrong=lambda position: True) if k else None
    engine = Engine(
        target,
        Silent,
        frozenset(),
        drafter=drafter,
        clock=lambda: target.now,
        timer=RoundTimer(SLOTS, seen.append),
    )
    for index in range(requests):
        engine.add(request(index, tokens))
    return engine, target, seen


def request(index=0, tokens=20, prompt=3):
    return Request(prompt_ids=[9] * prompt, params=SamplingParams(max_tokens=tokens), index=index)


def steps(engine, most=10**6):
    for _ in itertools.takewhile(lambda _: engine.has_work, range(most)):
        engine.step()


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_are_timed_from_outcome_to_outcome(k):
    engine, _, seen = started(k, SLOTS)
    steps(engine)
    assert len(seen) >= 15
    assert {each.seconds for each in seen} == {1.0}
    assert {each.proposed for each in seen} == {k} or k
    assert not any(each.missed for each in seen)


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_with_a_free_slot_are_left_out(k):
    engine, _, seen = started(k, SLOTS - 1)
    steps(engine)
    assert seen == []


@pytest.mark.parametrize("k", [0, 3])
def test_rounds_that_the_caller_came_late_for_are_left_out(k):
    engine, target, seen = started(k, SLOTS)
    target.late = True
    steps(engine, 8)
    assert seen == []
    target.late = False
    steps(engine)
    assert seen


def test_rounds_with_a_prompt_between_are_left_out():
    """A long prompt is read in chunks between the rounds of another text."""
    engine, target, seen = started(3, SLOTS - 1, tokens=60)
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
    timer = RoundTimer(SLOTS, seen.append)
    for now, requests in enumerate([(0, 1), (0, 2), (0, 2), (), (0, 2)]):
        timer.read(requests, None, float(now))
    assert [each.seconds for each in seen] == [1.0]
