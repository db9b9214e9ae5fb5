"""A worker that is started again serves with few programs, and gets the others while it does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.placement.process import loading
from ssd_jax.roles.records import no_promotion
from tests.fakes.stepwise import asked_records


class Programs:
    def __init__(self, base, branches, others=None, batches=None):
        self.base, self.branches, self.others = base, branches, others
        self.batches = batches


class Draft:
    def __init__(self, menu, parameters, temperature):
        self.budgets = [programs.branches for programs in menu]

    def extend(self, programs):
        self.budgets.append(programs.branches)


@pytest.fixture
def drafts(monkeypatch):
    """Drafts of 16 branches, and which budgets have been run once."""
    warm, completed = [], []
    monkeypatch.setattr(loading, "BranchDraft", Draft)
    monkeypatch.setattr(loading, "branching_draft", Draft)
    monkeypatch.setattr(loading, "ExpansionPrograms", Programs)
    monkeypatch.setattr(loading, "run_once", lambda draft: warm.append([*draft.budgets]))
    base = SimpleNamespace(complete=lambda: completed.append([*warm]))
    made = loading._Drafts((Programs(base, 16),), [], None)
    made.warm, made.completed = warm, completed
    return made


def test_drafts_that_there_are_and_will_be_get_programs_of_fewer_branches(drafts):
    early = [drafts.new(), drafts.new()]
    drafts.extend([4, 8])
    assert [sorted(draft.budgets) for draft in (*early, drafts.new())] == [[4, 8, 16]] * 3
    assert drafts.warm == [[16], [8], [4]]
    assert drafts.completed == [
        [[16]]
    ]  # just-in-time drafts first: there is nothing in their place


def test_where_no_fewer_branches_are_asked_for_just_in_time_drafts_are_run_once(drafts):
    drafts.extend([])
    assert (drafts.warm, drafts.completed) == ([[16], [16]], [[[16]]])


def test_programs_that_come_before_the_first_engine_are_in_its_draft_too(drafts):
    drafts.extend([4, 8])
    assert [sorted(drafts.new().budgets) for _ in range(2)] == [[4, 8, 16]] * 2


def test_a_draft_drafts_nothing_just_in_time_before_it_has_the_programs():
    base = object.__new__(DraftPrograms)
    base.drafting, base._compiled = SimpleNamespace(k=3), {("prefill", 32): None}
    draft = object.__new__(BranchDraft)
    draft._base = base
    draft.slots, draft.k, draft._promote = 2, 3, lambda promotion: None
    assert asked_records(draft, no_promotion(2, 3), [3, 0]).lengths().tolist() == [0, 0]
    base._compiled = {("start", 3): None}
    assert base.drafts
