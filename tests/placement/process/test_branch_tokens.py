"""What the branches say is taken as it comes, and waited for no longer than it is of use."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ssd_jax.roles.records import BranchTokens, SlotOpening, promotion
from ssd_jax.sampling.params import SamplingParams
from tests.placement.process.script import PROMPT, SLOTS, K, M, ScriptedDraft, said_at
from tests.placement.process.serving import served


class Stepped(ScriptedDraft):
    """Makes a forward each time that it is let."""

    def __init__(self):
        super().__init__()
        self.let = Stepped.let = threading.Semaphore(0)

    def branch_tokens(self, forwards, until=None):
        assert self.let.acquire(timeout=60)
        return super().branch_tokens(forwards)


@pytest.fixture
def draft():
    """A remote draft whose branches of slot 0 are being expanded."""
    with served(draft=Stepped, patience=0.2) as run:
        remote = run.draft
        remote.open(SlotOpening(0, SamplingParams()))
        remote.prefill(0, [said_at(at) for at in range(PROMPT)], 0)
        told = promotion(SLOTS, K)
        told.position[0], told.pending[0] = PROMPT - 1, said_at(PROMPT - 1)
        remote.promote(told)
        counts = np.zeros((SLOTS, K + 1), np.int32)
        counts[0, 0] = M
        nothing = np.zeros((SLOTS, K), np.int32)
        remote.expand(counts, follow=np.zeros(SLOTS, bool), lowered=nothing, forwards=K)
        yield remote
        Stepped.let.release(K)


def forwards(draft, count):
    """Lets the worker make some; waits for the last of them."""
    Stepped.let.release(count)
    end = time.monotonic() + 60
    while draft._link._told is None or draft._link._told.branches.forwards < count:
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_the_same_object_says_that_nothing_has_come_since(draft):
    forwards(draft, 1)
    first = draft.branch_tokens(1)
    assert first.forwards == 1
    assert draft.branch_tokens(1) is first
    assert draft.branch_tokens(1, lambda: True) is first
    forwards(draft, 2)
    second = draft.branch_tokens(1)
    assert second.forwards > 1
    assert second is not first
    assert draft.branch_tokens(1) is second


def test_a_wait_ends_when_the_outcome_is_there_and_is_no_absence(draft):
    outcome, counters = threading.Event(), draft.counters.copy()
    threading.Timer(0.5, outcome.set).start()  # later than the draft's patience
    began = time.monotonic()
    assert draft.branch_tokens(1, outcome.is_set) is None
    assert 0.4 < time.monotonic() - began < 5
    assert draft.counters == counters
    forwards(draft, 1)
    assert isinstance(draft.branch_tokens(1), BranchTokens)


def test_a_wait_ends_when_the_branches_come(draft):
    threading.Timer(0.1, Stepped.let.release).start()
    found = draft.branch_tokens(1, lambda: False)
    assert found.forwards == 1
    assert found.bonus[0].tolist() == [said_at(PROMPT), *range(2, M + 1)]
    assert (found.bonus[1] == -1).all()


def test_a_wait_for_more_gives_what_has_come_when_time_is_up(draft):
    forwards(draft, 1)
    first = draft.branch_tokens(1)
    assert draft.branch_tokens(2, lambda: True) is None
    assert draft.branch_tokens(2) is first
    assert "late" not in draft.counters


def test_a_wait_ends_when_the_worker_is_gone(draft):
    threading.Timer(0.1, draft._link.close).start()
    assert draft.branch_tokens(1, lambda: False) == "dead"
    assert draft.branch_tokens(1) == "dead"
    assert draft.counters["dead"] == 1  # of a round, however often it is asked


def test_branches_of_a_request_that_is_gone_are_none(draft):
    forwards(draft, 1)
    assert (draft.branch_tokens(1).bonus[0] >= 0).all()
    draft.open(SlotOpening(0, SamplingParams(), 1))
    found = draft.branch_tokens(1)
    assert (found.bonus == -1).all()
    assert not found.lengths.any()
