"""Rounds of mode sd that are run to be timed."""

import numpy as np
import pytest

from ssd_jax.testing.fakes import FakeDrafter, FakeTarget
from ssd_jax.tuning.engine_rounds import EngineRounds
from tests.tuning.watch import Watch

SLOTS, K = 3, 4


def script(prompt, position):
    return 40 + position % 7


class Target(FakeTarget):
    """Its forwards take 1 s, and a tenth for each token that they verify."""

    def __init__(self, watch, **settings):
        super().__init__(script, slots=SLOTS, **settings)
        self.watch, self.verified = watch, []

    def forward(self, tokens, lengths, drafted=None):
        self.verified.append([] if drafted is None else drafted.lengths.tolist())
        self.watch.now += 1.0 + 0.1 * (0 if drafted is None else drafted.lengths.max())
        return super().forward(tokens, lengths, drafted)


class Drafter(FakeDrafter):
    """Takes 0.2 s for each token that is asked for."""

    def __init__(self, watch, **settings):
        super().__init__(script, k=K, slots=SLOTS, **settings)
        self.watch = watch

    def propose(self, batch):
        self.watch.now += 0.2 * batch.limit.max()
        return super().propose(batch)


def rounds(watch, *, context=64, max_chunk=4, **of_drafter):
    target = Target(watch, context=context, max_chunk=max_chunk)
    return target, EngineRounds(target, Drafter(watch, **of_drafter), [1] * 6, clock=watch)


@pytest.mark.parametrize(
    "of_drafter",
    [{}, {"wrong": lambda position: True}, {"length": lambda position: position % 3}],
    ids=["accepted", "rejected", "short"],
)
def test_every_slot_verifies_exactly_k_tokens_in_every_round_that_counts(of_drafter):
    """Whatever is accepted, and however often texts end meanwhile."""
    watch = Watch()
    target, engine = rounds(watch, **of_drafter)
    for k in (1, 4, 2) * 8:
        assert engine.begin(k)
        assert engine.run() == pytest.approx(0.2 * k + 1.0 + 0.1 * k)
        assert target.verified[-2:] == [[k] * SLOTS] * 2


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
    target, engine = rounds(watch)
    engine._engine._seats.offer = lambda: None
    assert not engine.begin(K, 2)
    assert np.size(target.verified) == 0


class Running:
    """Outcomes of a program that ends at a time of the clock."""

    def __init__(self, watch, found, end):
        self.watch, self.found, self.end, self.bonus = watch, found, end, found.bonus

    def ready(self):
        return self.watch.now >= self.end

    def read(self):
        self.watch.now = max(self.watch.now, self.end)
        return self.found.read()


class Elsewhere(FakeTarget):
    """Its programs run beside the host, for a second each."""

    def __init__(self, watch):
        super().__init__(script, slots=SLOTS, context=64, max_chunk=4)
        self.watch, self.end = watch, 0.0

    def forward(self, tokens, lengths, drafted=None):
        self.end = max(self.end, self.watch.now) + 1.0
        return super().forward(tokens, lengths, drafted)

    def accept(self, logits, proposal=None):
        return Running(self.watch, super().accept(logits, proposal), self.end)

    def prefill_last(self, slot, tokens, offset):
        return Running(self.watch, super().prefill_last(slot, tokens, offset), self.watch.now)


class Delayed(Drafter):
    """Other work delays the end of a step by these seconds, in turn."""

    delays: tuple[float, ...] = ()

    def speculate(self):
        super().speculate()
        if self.delays:
            self.watch.now, self.delays = self.watch.now + self.delays[0], self.delays[1:]


@pytest.mark.parametrize("delays", [(), (0.6,), (5.0,), (0.0, 0.6), (5.0, 5.0, 0.6)])
def test_a_step_whose_end_is_delayed_makes_no_round_look_short(delays):
    """The program that it dispatched goes on meanwhile."""
    watch = Watch()
    drafter = Delayed(watch)
    engine = EngineRounds(Elsewhere(watch), drafter, [1] * 6, clock=watch)
    assert engine.begin(2)
    drafter.delays = delays
    assert engine.run() == pytest.approx(1.0 + 0.2 * 2)
