"""Text with several draft workers is that of autoregressive decoding, with one draft's hits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.loading.loaded import Loaded
from ssd_jax.placement.parallel.by_branches import DraftByBranches
from ssd_jax.roles.activity import Activity
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.division import share
from tests.llm.paged import opened
from tests.llm.runs import ids, outputs, requests
from tests.placement.remote import workers
from tests.sampling.edits import Edit, edited
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("steady_streams")
M = 8


class OnHost(BranchDraft):
    """One whose tokens and proposals come to the host, as from a worker."""

    page_size = 0

    def tokens(self):
        return np.asarray(super().tokens())

    def proposal(self):
        return Proposal(*map(np.asarray, super().proposal()))

    def activity(self):
        return Activity()

    def close(self):
        pass


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Target and draft."""
    root = workers.checkpoints(tmp_path_factory.mktemp("parallel"))
    return [str(root / "target"), str(root / "draft")]


@pytest.fixture(scope="module")
def inline(pair):
    """A model, and what makes its draft of so many parts, in this process."""
    llm = opened(pair, slots=2, budget=str(M), backup="draft")
    loaded = llm.loaded
    branching = loaded.inline.branching()[-1]
    programs = {1: branching}

    def draft(parts):
        if parts not in programs:
            programs[parts] = ExpansionPrograms(branching.base, share(M, parts), branching)
        made = [OnHost([programs[parts]], loaded.inline.parameters()) for _ in range(parts)]
        return made[0] if parts == 1 else DraftByBranches(made)

    return llm, draft


def generated(inline, parts, verify="coupled"):
    """Ids and figures of greedy and sampled requests with a draft of so many parts."""
    llm, draft = inline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loaded, "branching", lambda _loaded: draft(parts))
        llm._engines.clear()
        found = outputs(llm, requests(llm, verify), "ssd")
    names = ("hit_rate", "acceptance_length", "acceptance_by_position")
    return ids(found), [[output.metrics[name] for name in names] for output in found]


@pytest.fixture(scope="module")
def alone(inline):
    expected, figures = generated(inline, 1)
    llm, _ = inline
    assert expected == ids(outputs(llm, requests(llm, "coupled"), "ar"))
    assert max(hits or 0 for _, hits, *_ in figures) > 0.3
    return expected, figures


@pytest.mark.more
@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parts_have_the_branches_of_one_draft(inline, alone, parts):
    assert generated(inline, parts) == alone


FAULTS = {
    "every part makes the same branches": Edit(
        DraftByBranches, "expand", "skip=skip,", "skip=None,"
    ),
    "the others do not follow": Edit(
        DraftByBranches, "expand", "(request.follow | (records.owner != number))", "request.follow"
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_of_parts_cost_hits(inline, alone, name):
    with edited([FAULTS[name]]):
        expected, figures = generated(inline, 2)
    assert expected == alone[0]  # what a draft does costs speed alone
    assert figures != alone[1]


@pytest.fixture(scope="module")
def expected(pair):
    llm = opened(pair, slots=3, mode="ar", draft=None, draft_placement=None, k=None, budget=None)
    return ids(outputs(llm, requests(llm, "coupled"), "ar"))


@pytest.mark.more
@pytest.mark.parametrize("split", ["slots", "branches"])
def test_remote_workers_share_slots_or_branches(pair, worker, expected, split):
    """Three slots: one worker has one that nobody uses."""
    where = f"remote:{worker.address},{worker.address}"
    with opened(pair, slots=3, draft_placement=where, draft_split=split) as llm:
        assert str(llm.placement).endswith(f", 2 workers that share {split}")
        patient(llm)
        found = outputs(llm, requests(llm, "coupled"), "ssd")
        assert ids(found) == expected
        assert workers.hits(found) > 1
        for draft_worker in llm.loaded.worker.workers:
            assert not {"late", "dead", "stale"} & {*draft_worker.counters}


@pytest.mark.slow  # `test_sharing.py` has it by default, with a scripted worker
@pytest.mark.parametrize("split", ["branches", "slots"])
def test_a_worker_that_is_killed_costs_its_share_until_it_is_back(pair, expected, split):
    with opened(
        pair, slots=3, draft_placement="process", draft_workers=2, draft_split=split
    ) as llm:
        patient(llm)
        first, other = llm.loaded.worker.workers
        assert workers.hits(outputs(llm, requests(llm, "coupled"), "ssd")) > 1
        os.kill(first.supervisor.pid, signal.SIGKILL)
        found = outputs(llm, requests(llm, "coupled"), "ssd")
        assert ids(found) == expected
        assert workers.hits(found) > 0  # those of the other
        assert first.counters["dead"] > 0

        def back():
            dead = first.counters["dead"]
            again = outputs(llm, requests(llm, "coupled"), "ssd")
            assert ids(again) == expected
            return first.supervisor.starts == 2 and first.counters["dead"] == dead

        eventually(back)
        assert not {"late", "dead", "stale"} & {*other.counters}


def patient(llm):
    for worker in llm.loaded.worker.workers:
        worker.patience = 120.0


@pytest.fixture(scope="module")
def worker(pair):
    with workers.started(Path(pair[0]).parent) as started:
        yield started
