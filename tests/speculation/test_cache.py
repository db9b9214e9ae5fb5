"""The speculation cache finds the branch that was prepared for an outcome, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_jax.roles.records import BranchTokens, no_branches
from ssd_jax.speculation.cache import SpeculationCache
from tests.sampling.edits import Edit, edited

K, M = 3, 6


def branch_tokens(bonus, lengths=None) -> BranchTokens:
    """Branches [B, M] with these bonus tokens; those of branch m are 10 m, 10 m + 1, ..."""
    bonus = np.array(bonus, np.int32)
    rows, branches = bonus.shape
    lengths = np.full(bonus.shape, K, np.int32) if lengths is None else np.array(lengths, np.int32)
    tokens = np.arange(branches)[None, :, None] * 10 + np.arange(K)
    tokens = np.broadcast_to(tokens, (rows, branches, K)).astype(np.int32)
    return BranchTokens(bonus, lengths, tokens, np.zeros_like(tokens), K)


def cache_of(counts, bonus, lengths=None) -> SpeculationCache:
    found = SpeculationCache()
    found.prepare(np.array(counts, np.int32))
    found.branches = branch_tokens(bonus, lengths)
    return found


def look_up(found: SpeculationCache, *outcomes):
    k, bonus = np.array(outcomes, np.int32).T
    return found.look_up(k, bonus)


# Two bonus tokens each for k = 0, 1 and 2.
ONE = ([[2, 2, 2, 0]], [[5, 6, 7, 5, 8, 9]])


@pytest.mark.parametrize(
    ("outcome", "branch", "rank"),
    [((0, 5), 0, 0), ((0, 6), 1, 1), ((1, 7), 2, 0), ((1, 5), 3, 1), ((2, 9), 5, 1)],
)
def test_the_outcome_finds_its_branch(outcome, branch, rank):
    found = look_up(cache_of(*ONE), outcome)
    assert (found.branch[0], found.rank[0], found.prepared[0]) == (branch, rank, 2)
    assert found.lengths.tolist() == [[K] * M]


@pytest.mark.parametrize("outcome", [(0, 7), (1, 6), (2, 5), (3, 5), (-1, 5)])
def test_another_outcome_finds_nothing(outcome):
    found = look_up(cache_of(*ONE), outcome)
    assert (found.branch[0], found.rank[0]) == (-1, -1)
    assert found.prepared[0] == (2 if 0 <= outcome[0] < 3 else 0)


def test_each_row_is_looked_up_by_itself():
    counts = [[2, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [6, 0, 0, 0]]
    bonus = [
        [4, 5, 4, -1, -1, -1],
        [-1] * M,
        [4, 5, 6, 7, -1, -1],
        [1, -1, 3, 2, 5, -1],
    ]
    lengths = [[3, 2, 1, 0, 0, 0], [0] * M, [1, 1, 1, 0, 0, 0], [2, 0, 2, 2, 2, 0]]
    found = look_up(cache_of(counts, bonus, lengths), (1, 4), (0, 4), (3, 7), (0, 2))
    assert found.branch.tolist() == [2, -1, 3, 3]
    assert found.rank.tolist() == [0, -1, 0, 3]
    assert found.prepared.tolist() == [1, 0, 1, 4]
    assert found.lengths.tolist() == lengths


def test_the_lowest_of_two_branches_for_one_outcome_wins():
    """Its tokens may be worse: to look at them would bias the text."""
    found = look_up(cache_of([[3, 0, 0, 0]], [[8, 8, 8, -1, -1, -1]], [[0, 3, 2, 0, 0, 0]]), (0, 8))
    assert found.branch[0] == 0


def test_an_unfilled_cache_finds_nothing():
    found = cache_of(*ONE)
    found.prepare(np.array(ONE[0]))
    assert found.miss_cause(0) == "cold"
    nothing = look_up(found, (0, 5))
    assert (nothing.branch[0], nothing.prepared[0], nothing.lengths.size) == (-1, 0, 0)


def test_later_tokens_of_the_same_branches_replace_earlier_ones():
    found = cache_of(*ONE, [[1] * M])
    found.branches = branch_tokens(ONE[1])
    assert look_up(found, (0, 5)).lengths.tolist() == [[K] * M]


def test_a_look_up_agrees_with_a_search_of_every_branch():
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.multinomial(rng.integers(1, M + 1), [1 / 4] * 4, size=3)
        bonus = rng.integers(-1, 4, (3, M))
        outcomes = [(int(rng.integers(-1, 4)), int(rng.integers(0, 4))) for _ in range(3)]
        found = look_up(cache_of(counts, bonus), *outcomes)
        for row, (k, token) in enumerate(outcomes):
            places = [(k, rank) for k, n in enumerate(counts[row]) for rank in range(n)]
            real = [
                (place, rank, int(bonus[row, place]))
                for place, (accepted, rank) in enumerate(places)
                if accepted == k and bonus[row, place] >= 0
            ]
            hit = next(((place, rank) for place, rank, t in real if t == token), (-1, -1))
            assert (found.branch[row], found.rank[row]) == hit
            assert found.prepared[row] == len(real)


FLAWS = {
    "any k": Edit(SpeculationCache, "_find", "of_k.start : of_k.stop", "0:"),
    "any bonus token": Edit(SpeculationCache, "_find", "tokens.index(token)", "0"),
    "the last of equals": Edit(
        SpeculationCache,
        "_find",
        "tokens.index(token)",
        "len(tokens) - 1 - tokens[::-1].index(token)",
    ),
    "branches that are none": Edit(SpeculationCache, "_find", " - tokens.count(-1)", ""),
    "ranks of all": Edit(SpeculationCache, "_find", "of_k[rank]", "rank"),
    "kept when prepared": Edit(SpeculationCache, "prepare", "self.drop()", "pass"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_the_cache_are_caught(flaw):
    with edited([FLAWS[flaw]]), pytest.raises(AssertionError):
        all_of_them()


def all_of_them():
    for outcome, branch, rank in [((1, 5), 3, 1), ((0, 6), 1, 1)]:
        test_the_outcome_finds_its_branch(outcome, branch, rank)
    test_each_row_is_looked_up_by_itself()
    test_the_lowest_of_two_branches_for_one_outcome_wins()
    test_an_unfilled_cache_finds_nothing()


def tree_cache():
    """Two rows whose branches leave trees of 3 nodes: [node, bonus] of each."""
    outcomes = np.full((2, 4, 2), -1, np.int32)
    outcomes[0, :3], outcomes[1, 0] = [[0, 5], [2, 5], [2, 6]], [1, 7]
    branches = no_branches(2, 4, 2, 1, nodes=3)._replace(bonus=outcomes[:, :, 1])
    cache = SpeculationCache()
    cache.prepare(np.full((2, 3), 4))
    cache.branches = branches._replace(
        trees=branches.trees._replace(node=outcomes[:, :, 0]), lengths=np.full((2, 4), 3, np.int32)
    )
    return cache


TREE_LOOK_UPS = [
    # (node, bonus) of each row -> (branch, branches there, rank) of each
    ([(2, 6), (1, 7)], [(2, 2, 1), (0, 1, 0)]),
    ([(0, 5), (1, 5)], [(0, 1, 0), (-1, 1, -1)]),
    ([(2, 5), (0, 7)], [(1, 2, 0), (-1, 0, -1)]),
    ([(1, 5), (2, 6)], [(-1, 0, -1), (-1, 0, -1)]),
]


@pytest.mark.parametrize(("outcomes", "found"), TREE_LOOK_UPS)
def test_an_outcome_of_a_tree_is_a_row_and_the_token_behind_it(outcomes, found):
    nodes, tokens = zip(*outcomes, strict=True)
    lookup = tree_cache().look_up(nodes, tokens)
    assert [*zip(lookup.branch, lookup.prepared, lookup.rank, strict=True)] == found
    assert lookup.k.tolist() == list(nodes)
    assert lookup.node[0].tolist() == [0, 2, 2, -1]


def test_a_branch_behind_another_row_is_not_taken():
    flaw = Edit(SpeculationCache, "_find", "if node == k", "if node >= 0")
    with edited([flaw]), pytest.raises(AssertionError):
        test_an_outcome_of_a_tree_is_a_row_and_the_token_behind_it(*TREE_LOOK_UPS[-1])


def test_a_row_without_a_branch_says_why():
    counts = np.array([[2, 1, 0, 0], [2, 1, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]])
    found = cache_of(counts, [[5, 6, -1, -1, -1, -1], [-1] * M, [-1] * M, [-1] * M])
    branches = found.branches._replace(absent={1: "late"})
    found.branches = branches
    assert [found.miss_cause(row) for row in range(4)] == ["miss", "late", "cold", "cold"]
    found.absence = "dead"
    assert [found.miss_cause(row) for row in range(4)] == ["dead", "dead", "dead", "cold"]
    found.drop()
    assert found.miss_cause(0) == "cold"
