"""The estimator that every policy shares, and what rounds have brought."""

from __future__ import annotations

import pytest

from ssd_jax.speculation.acceptance import AcceptanceEstimator, AcceptanceStats, odds, smoothed


def test_a_guess_counts_for_its_weight():
    found = AcceptanceEstimator(guess=0.5, weight=4)
    assert found.rate("a") == found.average == 0.5
    found.observe(2, ["a"] * 4)  # the fourth was never looked at
    assert found.rate("a") == pytest.approx((2 + 4 * 0.5) / (3 + 4))
    assert found.rate("b") == 0.5
    assert found.rate("b", 0.25) == 0.25
    assert smoothed(1, 1, 0.5, 1) == 0.75


def test_each_token_counts_for_its_own_key():
    found = AcceptanceEstimator()
    found.observe(1, ("x", "y", "x"))
    found.observe(3, range(3))
    assert (found.accepted["x"], found.judged["x"]) == (1, 1)
    assert (found.accepted["y"], found.judged["y"]) == (0, 1)
    assert [found.accepted[place] for place in range(3)] == [1, 1, 1]
    assert found.average == pytest.approx((4 + 6.4) / (5 + 8))


def test_a_record_of_partly_known_keys_teaches_the_known_ones():
    found = AcceptanceEstimator()
    found.observe(3, ("x", "y"))
    assert found.judged == found.accepted == {"x": 1, "y": 1}
    found.observe(0, ())
    assert found.judged.total() == 2


def test_rates_have_limits_and_the_average_has_none():
    found = AcceptanceEstimator()
    for _ in range(10_000):
        found.observe(4, "good")
        found.observe(0, "bad")
    assert (found.rate("g"), found.rate("b")) == (0.99, 0.01)
    never = AcceptanceEstimator(guess=0.0)
    assert (never.average, never.rate("b")) == (0.0, 0.01)


def test_odds_of_each_number_of_accepted_tokens():
    assert odds([]) == [1.0]
    assert odds([0.5, 0.25]) == [0.5, 0.375, 0.125]


def test_the_next_hit_counts_as_often_as_one_came_after_such_a_round():
    found = AcceptanceStats()
    assert found.next_round(empty=True) == 0
    found.round(4, hit=True, empty=False, prepared=True)
    found.round(4, hit=True, empty=False, prepared=False)
    found.round(1, hit=False, empty=False, prepared=False)
    assert found.next_round(empty=True) == pytest.approx(3)
    assert found.next_round(empty=False) == pytest.approx(3 / 2)  # one look to begin with


def test_usual_is_the_mean_of_recent_rounds():
    found = AcceptanceStats()
    assert found.usual(2) == found.tokens(2)
    for tokens in (1, 4):
        found.round(tokens, hit=True, empty=False, prepared=True)
    assert found.usual(2) == 2.5
    for _ in range(100):
        found.round(3, hit=True, empty=False, prepared=True)
    assert found.usual(2) == 3


def test_expected_tokens_are_a_geometric_sum_of_what_was_accepted():
    found = AcceptanceStats()
    assert found.tokens(0) == 1
    assert found.tokens(2) == pytest.approx(1 + 0.8 + 0.64)
    for _ in range(1000):
        found.observe(1, 2)  # one accepted, one rejected
    assert found.tokens(2) == pytest.approx(1.75, abs=0.01)


def test_tokens_of_a_known_confidence_have_the_rate_of_their_class():
    found = AcceptanceStats()
    assert found.tokens(3, (7, 0)) == found.tokens(3)
    for _ in range(1000):
        found.observe(1, 2, (7, 0))  # of class 7 accepted, of class 0 rejected
    assert found.tokens(1, (7,)) == pytest.approx(1.99)
    assert found.tokens(2, (0, 7)) == pytest.approx(1 + 0.01 + 0.01 * 0.99, abs=0.001)
    assert found.tokens(2, (0,)) == pytest.approx(1 + 0.01 + 0.01 * 0.5, abs=0.001)
    assert found.tokens(1, (7, 7, 7)) == found.tokens(1, (7,))
    assert found.tokens(2) == pytest.approx(1.75, abs=0.01)


def test_tokens_after_the_first_rejected_one_say_nothing():
    one, other = AcceptanceStats(), AcceptanceStats()
    one.observe(1, 2)
    other.observe(1, 5)
    assert one.tokens(3) == other.tokens(3)
