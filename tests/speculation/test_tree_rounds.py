"""What the controller counts of a tree, and what it proposes after a miss where there are trees."""

import numpy as np
import pytest

from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import CacheLookup, RecordRequest, SlotOpening, draft_batch, no_branches
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.controller import Controller, Policies
from ssd_jax.speculation.fan_out import UniformFanOut
from ssd_jax.speculation.sequence_state import RoundState, within_depth
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan
from tests.sampling.edits import Edit, edited

PARENTS = [0, 0, 1, 2, 1, 3, 5]


@pytest.mark.parametrize(
    ("limit", "found"), [(0, (0, 0)), (1, (2, 1)), (2, (5, 2)), (3, (7, 3)), (9, (7, 3))]
)
def test_nodes_within_a_depth_are_counted(limit, found):
    assert within_depth(PARENTS, limit) == found


def test_a_proposal_is_as_long_as_its_longest_path_and_has_no_node_beyond_the_limit():
    branches = no_branches(2, 1, 4, 3, nodes=7)
    branches.lengths[:, 0] = 7, 3
    branches.trees.parents[:, 0] = PARENTS
    row = np.zeros(2, np.int32)
    lookup = CacheLookup(row, row, row, row, branches.lengths)
    batch = draft_batch(2, 5)
    limit = np.array([2, 4], np.int32)
    state = RoundState(0.0, batch, limit, {0: None, 1: None}, {}, lookup, np.zeros(2, np.int32))
    state.count_won(branches)
    assert state.lengths.tolist() == [2, 2]
    assert state.nodes == {0: 5, 1: 3}


class TreesOnDemand(BranchingDraft):
    """A draft that has no branches in time, and draws a tree where it is waited for."""

    slots, k, branches, nodes = 2, 3, 2, 5
    TOKENS = np.arange(10, dtype=np.int32).reshape(2, 5)
    TREE = np.array([[0, 0, 1, 1, 3]] * 2, np.int32)

    def __init__(self) -> None:
        self.requests: list[RecordRequest] = []

    def open(self, opening):
        pass

    def prefill(self, slot, tokens, offset):
        pass

    def record(self, request):
        self.requests.append(request)
        return DrawnTrees(request)

    def expand(self, request):
        return NoBranches()


class NoBranches(ExpansionAnswer):
    def branches(self, forwards, until=None):
        return "late"


class DrawnTrees(RecordAnswer):
    def __init__(self, request) -> None:
        self._request = request

    def lengths(self):
        return self._request.drafts

    def tokens(self):
        return TreesOnDemand.TOKENS

    def parents(self):
        return TreesOnDemand.TREE

    def confidence(self):
        return np.full((2, 5), UNKNOWN, np.int32)

    def proposal(self):
        raise AssertionError("point masses have no q")


def missed(backup):
    """What is proposed after a miss in both slots, whose limits are 3 and 2, and the draft."""
    draft = TreesOnDemand()
    tuner = FixedTuner(SpeculationPlan.of_branches(3, 2))
    policies = Policies(
        k=3,
        tuner=tuner,
        fan_out=UniformFanOut,
        backup=backup,
        tokens=20,
        lowers=False,
        rule="coupled",
    )
    controller = Controller(draft, policies)
    batch = draft_batch(2, 4)
    for slot in range(2):
        controller.open(SlotOpening(slot, SamplingParams(max_tokens=9), slot))
        controller.prefill(slot, [5, 6], 0, last=True)
    controller.speculate()
    batch.pending[:], batch.position[:], batch.tokens[:, 0], batch.counts[:] = 7, 2, 7, 1
    batch.limit[:], batch.room[:] = (3, 2), 8
    return controller.propose(batch), draft


@pytest.mark.parametrize("backup", ["draft", "auto"])
def test_after_a_miss_the_trees_are_those_that_the_draft_was_waited_for(backup):
    drafted, draft = missed(backup)
    assert drafted.tokens is TreesOnDemand.TOKENS
    assert drafted.parents is TreesOnDemand.TREE
    assert drafted.lengths.tolist() == draft.requests[-1].drafts.tolist() == [3, 2]
    assert drafted.chains == []
    assert set(drafted.sources.values()) == {"late"}


def test_after_a_miss_that_waits_for_nothing_there_is_no_tree():
    drafted, _ = missed("none")
    assert drafted.lengths.tolist() == [0, 0]
    assert drafted.chains == [0, 1]


MUTANTS = {
    "parents of the promotion": (
        "records.tokens(), records.parents()",
        "records.tokens(), parents",
    ),
    "drafted trees counted as chains": ("and not request.drafts[slot]", ""),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_in_what_a_miss_proposes_is_caught(mutant):
    with edited([Edit(Controller, "propose", *MUTANTS[mutant])]), pytest.raises(AssertionError):
        test_after_a_miss_the_trees_are_those_that_the_draft_was_waited_for("draft")
