"""What a start measures, on roles whose costs are known."""

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.runtime import measuring
from ssd_jax.runtime.measuring import measure_branches, measure_drafter, measure_target
from ssd_jax.runtime.roles import Drafted, News

SLOTS, CONTEXT, K = 2, 64, 4


class Watch:
    """A clock that work moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Target:
    """Takes 1 s and a tenth for each proposed token, the first time 50 s."""

    slots, context = SLOTS, CONTEXT

    def __init__(self, watch):
        self.watch, self.cold, self.width = watch, True, 0
        self.open = lambda *_: None

    def forward(self, tokens, lengths, drafted=None):
        assert tokens.shape == lengths.shape == (SLOTS,)
        self.width = 0 if drafted is None else int(drafted.lengths.min())
        assert lengths.min() > 0
        assert lengths.max() + self.width < CONTEXT
        self.watch.now += 50.0 * self.cold
        self.cold = False
        return self

    def read(self):
        self.watch.now += 1.0 + 0.1 * self.width


def test_a_verification_of_each_width_is_timed_when_it_is_warm():
    watch = Watch()
    proposals = {0: None, 2: object(), 4: object()}
    found = measure_target(Target(watch), proposals, clock=watch)
    assert found == pytest.approx({0: 1.0, 2: 1.2, 4: 1.4})


class Drafter:
    k = K

    def __init__(self, watch):
        self.watch = watch
        self.open = lambda *_: None

    def prefill(self, slot, tokens, offset, *, last):
        assert offset == 0
        assert last
        self.prompt = len(tokens)

    def propose(self, rows):
        assert [row.slot for row in rows] == list(range(SLOTS))
        assert all(row.position == self.prompt for row in rows)
        assert self.prompt + K < CONTEXT
        return Drafted(np.full(SLOTS, K, np.int32), None)


def test_a_drafted_token_is_timed_until_it_is_there():
    watch = Watch()

    def wait(drafted):
        watch.now += 0.2 * int(drafted.lengths.max())

    found = measure_drafter(Drafter(watch), SLOTS, CONTEXT, wait, clock=watch)
    assert found == pytest.approx(0.2)


class Draft:
    """A forward of M branches takes M hundredths of a second, a drafted token 0.3 s.

    `late` answers do not come in time.
    """

    slots, k, branches = SLOTS, K, 16

    def __init__(self, watch, late=0):
        self.watch, self.late, self.expanded = watch, late, None
        self.open = lambda *_: None
        self.confidence = lambda: None
        self.length = [0] * SLOTS

    def prefill(self, slot, tokens, offset):
        self.length[slot] = offset + len(tokens)

    def move(self, moves):
        assert [moved.slot for moved in moves] == list(range(SLOTS))
        assert [moved.position + 1 for moved in moves] == self.length
        self.expanded = None

    def draft(self, limits, *, lowered):
        self.watch.now += 0.3 * limits.max()
        return limits * (not self._is_late())

    def expand(self, counts, *, follow, lowered, forwards):
        assert not follow.any()
        assert set(counts.sum(axis=1)) <= {4, 16}
        self.expanded = counts.sum(axis=1).max(), forwards

    def news(self, forwards):
        budget, made = self.expanded
        assert forwards <= made
        self.watch.now += 0.01 * budget * forwards
        if self._is_late():
            return "late"
        return News(*(np.zeros(0),) * 5, forwards)

    def _is_late(self):
        self.late -= 1
        return self.late >= 0


@pytest.mark.parametrize("late", [0, 1, 3])
def test_branches_are_timed_by_their_number_and_late_answers_are_asked_for_again(late, monkeypatch):
    monkeypatch.setattr(measuring, "_PAUSE", 0.0)
    watch = Watch()
    backup, step = measure_branches(Draft(watch, late), (16, 4), CONTEXT, clock=watch)
    assert backup == pytest.approx(0.3)
    assert step[16] == pytest.approx(0.16)
    assert step[4] == pytest.approx(0.04, rel=0.6 if late else 1e-6)


def test_a_worker_that_never_answers_is_reported(monkeypatch):
    monkeypatch.setattr(measuring, "_PAUSE", 0.0)
    watch = Watch()
    with pytest.raises(InputError, match="did not answer while its speed was measured"):
        measure_branches(Draft(watch, 10**9), (4,), CONTEXT, clock=watch)


@pytest.mark.parametrize("context", [12, 20, 64, 4096])
def test_what_is_measured_fits_the_context(context):
    assert 0 <= measuring._position(context, 8) <= max(0, context - 10)
