"""What the branches say is taken as it comes, and waited for no longer than it is of use."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from ssd_jax.roles.records import BranchTokens, SlotOpening, no_promotion
from ssd_jax.sampling.params import SamplingParams
from tests.fakes.instrument import instrument
from tests.fakes.stepwise import asked_branches, asked_records
from tests.placement.process.script import PROMPT, SLOTS, K, M, ScriptedDraft, token_at
from tests.placement.process.serving import served


@pytest.fixture
def asked():
    """Branches of slot 0 that a worker is being asked for, which has as many as it is `let`."""
    let = threading.Semaphore(0)
    wait = {"branch_tokens": lambda *_: let.acquire(timeout=60)}
    with served(draft=lambda: instrument(ScriptedDraft(), note=wait), patience=0.2) as run:
        remote = run.draft
        remote.open(SlotOpening(0, SamplingParams()))
        remote.prefill(0, [token_at(at) for at in range(PROMPT)], 0)
        promotion = no_promotion(SLOTS, K)
        promotion.position[0], promotion.pending[0] = PROMPT - 1, token_at(PROMPT - 1)
        asked_records(remote, promotion)
        counts = np.zeros((SLOTS, K + 1), np.int32)
        counts[0, 0] = M
        branches = asked_branches(remote, counts, K)
        branches.let = let
        yield branches
        let.release(K)


def forwards(asked, count):
    """Lets the worker make some; waits for the last of them."""
    asked.let.release(count)
    end = time.monotonic() + 60
    link = asked._link
    while link._branches is None or link._branches.branches.forwards < count:
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_the_same_object_says_that_nothing_has_come_since(asked):
    forwards(asked, 1)
    first = asked.branches(1)
    assert first.forwards == 1
    assert asked.branches(1) is first
    assert asked.branches(1, lambda: True) is first
    forwards(asked, 2)
    second = asked.branches(1)
    assert second.forwards > 1
    assert second is not first
    assert asked.branches(1) is second


def test_a_wait_ends_when_the_outcome_is_there_and_is_no_absence(asked):
    outcome, counters = threading.Event(), asked._draft.counters.copy()
    threading.Timer(0.5, outcome.set).start()  # later than the draft's patience
    assert asked.branches(1, outcome.is_set) is None
    assert outcome.is_set()
    assert asked._draft.counters == counters
    forwards(asked, 1)
    assert isinstance(asked.branches(1), BranchTokens)


def test_a_wait_ends_when_the_branches_come(asked):
    threading.Timer(0.1, asked.let.release).start()
    found = asked.branches(1, lambda: False)
    assert found.forwards == 1
    assert found.bonus[0].tolist() == [token_at(PROMPT), *range(2, M + 1)]
    assert (found.bonus[1] == -1).all()


def test_a_wait_for_more_gives_what_has_come_when_time_is_up(asked):
    forwards(asked, 1)
    first = asked.branches(1)
    assert asked.branches(2, lambda: True) is None
    assert asked.branches(2) is first
    assert "late" not in asked._draft.counters


def test_a_wait_ends_when_the_worker_is_gone(asked):
    threading.Timer(0.1, asked._link.close).start()
    assert asked.branches(1, lambda: False) == "dead"
    assert asked.branches(1) == "dead"
    assert asked._draft.counters["dead"] == 1  # of a round, however often it is asked


def test_branches_of_a_request_that_is_gone_are_none(asked):
    forwards(asked, 1)
    assert (asked.branches(1).bonus[0] >= 0).all()
    asked._draft.open(SlotOpening(0, SamplingParams(), 1))
    found = asked.branches(1)
    assert (found.bonus == -1).all()
    assert not found.lengths.any()
