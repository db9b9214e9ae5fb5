"""Tokens that trees and chains are expected to commit."""

import numpy as np
import pytest

from ssd_jax.roles.drafting import GAP_CLASSES, TreeShape
from ssd_jax.speculation.rank_rates import RankCounts, RankRates, Visit
from ssd_jax.speculation.tree_tokens import chain_tokens, class_shares, hit_rates, tree_tokens

SHAPE = TreeShape(nodes=16, depth=4)
RATES = RankRates(SHAPE).by_class
ALIKE = np.tile([0.5, 0.25, 0.125, 0.0, 0.0, 0.0], (GAP_CLASSES, 1))


def test_shares_of_classes_accept_as_often_as_is_asked():
    for acceptance in (0.4, 0.65, 0.9):
        shares = class_shares(RATES[:, 0], acceptance)
        assert shares.sum() == pytest.approx(1)
        assert shares @ RATES[:, 0] == pytest.approx(acceptance)
    assert class_shares(RATES[:, 0], 0.0) @ RATES[:, 0] == pytest.approx(RATES[0, 0], rel=1e-3)


def test_a_chain_commits_its_accepted_tokens_and_one_more():
    assert chain_tokens(0.5, 3) == 1.875


@pytest.mark.parametrize(
    ("nodes", "depth", "expected"),
    [
        (1, 1, 1.5),
        (3, 1, 1.875),
        (3, 2, 1 + 0.5 + 0.25 + 0.25),
        (5, 2, 1 + 0.5 + 0.25 + 0.25 + 0.125 + 0.125),
    ],
)
def test_a_tree_has_the_likeliest_nodes_and_commits_the_sum_of_their_odds(nodes, depth, expected):
    assert tree_tokens(ALIKE, 0.5, TreeShape(nodes=nodes, depth=depth)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("nodes", "depth", "branches", "expected"),
    [
        (3, 1, 2, (0.25 + 0.125, 0.75)),  # behind the two best leaves
        (1, 1, 3, (0.25 + 0.25 + 0.125, 0.875)),  # the pending token's other ranks, and the leaf's
        (2, 2, 2, (0.125 + 0.25, 0.75)),
    ],
)
def test_branches_have_the_likeliest_outcomes(nodes, depth, branches, expected):
    shape = TreeShape(nodes=nodes, depth=depth)
    assert hit_rates(ALIKE, 0.5, shape, branches) == pytest.approx(expected)


def test_a_tree_as_small_as_the_chain_commits_as_much_and_one_of_16_what_a_replay_gave():
    """Replay of a real pair: 18% and 30% more than a chain of 4, at rates of .87 and .777."""
    for acceptance, gain in ((0.87, 1.18), (0.777, 1.30)):
        chain = chain_tokens(acceptance, 4)
        found = [tree_tokens(RATES, acceptance, TreeShape(nodes=m, depth=4)) for m in (4, 16, 31)]
        assert found == sorted(found)
        assert 1 <= found[0] / chain < 1.07
        assert found[1] / chain == pytest.approx(gain, abs=0.05)


def test_what_earlier_starts_have_shown_counts_as_what_this_one_shows():
    visits = [Visit(3, [0, 1], 1), Visit(3, [0], 0), Visit(5, [0, 2], None)]
    first = RankRates(SHAPE)
    for _ in range(80):
        first.observe(visits, hot=True)
    second = RankRates(SHAPE, RankRates(SHAPE).counts.plus(first.counts))
    np.testing.assert_allclose(second.by_class, first.by_class)
    assert not second.counts.visited.any()
    assert second.by_class[3, 1] > RATES[3, 1]
    hot = np.array([False, True])
    untouched = RankRates(SHAPE).tables(hot)
    assert (second.tables(hot)[0] == untouched[0]).all()
    assert (second.tables(hot)[1] != untouched[1]).any()


def test_counts_of_many_starts_fade():
    counts = RankCounts.none(SHAPE.ranks).plus(RankCounts(*(np.ones((2, GAP_CLASSES, 6)),) * 2))
    assert (counts.recent(100).visited == counts.recent(16).visited).all()
    fewer = counts.recent(4)
    assert fewer.visited[..., 0].sum() == 4
    np.testing.assert_allclose(fewer.taken / fewer.visited, 1)
