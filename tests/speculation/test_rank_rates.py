"""Rates of ranks, from verifications of trees."""

import numpy as np
import pytest

from ssd_jax.roles.drafting import GAP_CLASSES, TreeShape
from ssd_jax.speculation.rank_rates import RankRates, Visit, path_visits

SHAPE = TreeShape(nodes=6, depth=3, ranks=4)
#      0
#     1  2        rows; node i is row i + 1
#    3 4  5
PARENTS, RANKS = [0, 0, 1, 1, 2, 0], [0, 1, 0, 2, 0, -1]
CLASSES = [5, 3, 2, -1, 0, -1, -1]


@pytest.mark.parametrize(
    ("last", "visits"),
    [
        (0, [Visit(5, [0, 1], None)]),
        (1, [Visit(5, [0, 1], 0), Visit(3, [0, 2], None)]),
        (2, [Visit(5, [0, 1], 1), Visit(2, [0], None)]),
        (3, [Visit(5, [0, 1], 0), Visit(3, [0, 2], 0)]),  # nobody knows what follows a leaf
        (4, [Visit(5, [0, 1], 0), Visit(3, [0, 2], 2), Visit(0, [], None)]),
    ],
)
def test_a_verification_visits_the_nodes_of_its_path(last, visits):
    assert path_visits(PARENTS, RANKS, CLASSES, last) == visits


def of_rows(rates: RankRates, hot: bool) -> np.ndarray:
    return rates.tables(np.array([hot]))[0]


def test_rates_approach_what_was_seen_and_only_of_that_class_and_those_ranks():
    rates, before = RankRates(SHAPE), of_rows(RankRates(SHAPE), hot=True)
    for index in range(4000):
        rates.observe([Visit(4, [0, 1], (0, 1, None, None)[index % 4])], hot=True)
    after = of_rows(rates, hot=True)
    np.testing.assert_allclose(after[0, 4, :2], 0.25, atol=0.02)
    np.testing.assert_allclose(after[0, 4, 2:], before[0, 4, 2:])
    np.testing.assert_allclose(np.delete(after, 4, axis=1), np.delete(before, 4, axis=1))
    np.testing.assert_allclose(of_rows(rates, hot=False), before)


def test_a_depth_has_its_own_rates_once_it_was_seen_often():
    rates = RankRates(SHAPE)
    for index in range(4000):
        rates.observe([Visit(1, [0], 0), Visit(1, [0], 0 if index % 5 == 0 else None)], hot=False)
    table = of_rows(rates, hot=False)
    assert table[0, 1, 0] > 0.95
    assert 0.18 < table[1, 1, 0] < 0.25
    assert 0.5 < table[2, 1, 0] < 0.7  # never seen: that of all depths


def test_first_guesses_are_less_than_one_in_all_and_fall_with_the_rank():
    table = of_rows(RankRates(TreeShape(nodes=31, depth=8)), hot=False)
    assert table.shape == (8, GAP_CLASSES, 6)
    assert (table.sum(axis=2) < 1).all()
    assert (np.diff(table, axis=2) < 0).all()
