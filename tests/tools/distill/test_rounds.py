"""Rounds over given texts: against simulation, by hand, and at their ends."""

import numpy as np
import pytest

from ssd_jax.tools.distill.evaluate import mean_of
from ssd_jax.tools.distill.rounds import MeasuredDraft, power_law, walk
from ssd_jax.tuning.throughput import tokens


def simulate(chances, k, tail, rng):
    """Rounds over one text, one by one: how many, and what was judged and accepted by place."""
    pending, length, count = 0, tail, 0
    judged, accepted = np.zeros(k), np.zeros(k)
    while pending < len(chances) - 1:
        count += 1
        run = 0
        while run < length and pending + run + 1 < len(chances):
            judged[run] += 1
            if rng.random() >= chances[pending + run + 1]:
                break
            accepted[run] += 1
            run += 1
        length = tail if run == length else k
        pending += run + 1
    return count, judged, accepted


def texts(*sizes, zero_or_one=False):
    rng = np.random.default_rng(1)
    drawn = [rng.random(size) for size in sizes]
    return [(one < 0.6).astype(float) if zero_or_one else one for one in drawn]


@pytest.mark.parametrize("tail", [None, 2])
def test_greedy_rounds_are_those_that_happen(tail):
    chances = texts(1, 2, 7, 30, 55, zero_or_one=True)
    found = walk(chances, 3, tail=tail)
    rng, first = np.random.default_rng(), 3 if tail is None else tail
    simulated = [simulate(one, 3, first, rng) for one in chances]
    assert found.count == sum(one[0] for one in simulated)
    np.testing.assert_array_equal(found.judged, sum(one[1] for one in simulated))
    np.testing.assert_array_equal(found.accepted, sum(one[2] for one in simulated))
    assert found.committed == 0 + 1 + 6 + 29 + 54
    assert found.tokens_per_call == found.committed / found.count


@pytest.mark.parametrize(("k", "tail"), [(1, 1), (4, 4), (4, 3)])
def test_sampled_rounds_are_those_expected(k, tail):
    chances, rng = texts(12)[0], np.random.default_rng(0)
    found, runs = walk([chances], k, tail=tail), 4000
    simulated = [simulate(chances, k, tail, rng) for _ in range(runs)]
    per = zip(*simulated, strict=True)
    for what, values in zip((found.count, found.judged, found.accepted), per, strict=True):
        error = 4.5 * np.std(values, axis=0) / np.sqrt(runs) + 1e-9
        assert (np.abs(np.mean(values, axis=0) - what) < error).all()


def test_a_round_commits_the_run_and_one():
    chances = [np.array([0, 1, 1, 0, 1, 1, 1, 1, 0], float)]
    # 1 1 x | 1 1 1 + | x: K = 3
    assert walk(chances, 3).count == 3
    # 1 1 + | 1 1 + | 1 x: K - 1 after a round without a rejection, and at first
    assert walk(chances, 3, tail=2).count == 3
    assert walk(chances, 8).count == 2
    assert np.isnan(walk([np.zeros(1)], 3).tokens_per_call)


def test_rates_give_the_tokens_of_a_round_in_a_long_text():
    chances = [np.full(3000, 0.7)]
    found = walk(chances, 4)
    np.testing.assert_allclose(found.rates, 0.7)
    assert tokens(found.rates) == pytest.approx(found.tokens_per_call, rel=2e-3)


def test_every_token_comes_from_somewhere():
    chances = texts(20, 9)
    found = walk(chances, 3)
    accepted = found.accepted.sum()
    assert accepted + found.corrected.sum() + found.added.sum() == pytest.approx(found.committed)


def test_misses_follow_the_law_of_ranks():
    """Every token is rejected; its place among those left is geometric: 2^-F miss."""
    rng = np.random.default_rng(0)
    places = rng.geometric(0.5, 5000)  # from 1: behind the rejected one
    rejected = walk([np.zeros(5000)], 2)
    single_miss, r = power_law(rejected, [places], greedy=True)
    found = [single_miss * count**-r for count in (1, 2, 3)]
    np.testing.assert_allclose(found, [0.5, 0.25, 0.125], atol=0.08)
    overstated, _ = power_law(rejected, [places], greedy=False)
    assert overstated > single_miss  # none is left out: the first place never hits
    accepted = walk([np.ones(5000)], 1)
    certain, _ = power_law(accepted, [np.zeros(5000, int)], greedy=True)
    assert certain == 0  # the bonus token after all is the likeliest
    assert power_law(walk([np.zeros(1)], 1), [np.zeros(1, int)], greedy=True)[0] == 1


def test_a_mean_counts_sets_alike():
    one = MeasuredDraft(by_length=((0.5,), (0.5, 0.1)), single_miss=0.2, r=1.0)
    two = MeasuredDraft(by_length=((0.7,), (0.7, 0.3)), single_miss=0.4, r=2.0)
    mean = MeasuredDraft(**mean_of([vars(one), vars(two)]))
    np.testing.assert_allclose(mean.rates(2, "hit"), [0.6, 0.2])
    assert mean.rates(0, "miss") == []
    assert (mean.single_miss, mean.r) == (pytest.approx(0.3), 1.5)
