"""What the controller counts of a tree."""

import numpy as np
import pytest

from ssd_jax.roles.records import CacheLookup, draft_batch, no_branches
from ssd_jax.speculation.sequence_state import RoundState, within_depth

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
