"""Predicted speeds: worked out by hand, and how they move with what they depend on."""

import dataclasses
import itertools

import pytest

from ssd_jax.speculation.fan_out import GeometricFanOut, UniformFanOut
from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.tuning import throughput
from ssd_jax.tuning.throughput import Costs, Guess, ar, best_sd, best_ssd, sd, ssd, tokens
from tests.sampling.edits import Edit, edited

HALF = Guess(acceptance=0.5, single_miss=0.5)
COSTS = Costs(verify={0: 1.0, 4: 1.5}, draft=0.1, backup=0.2, step={6: 0.3})
PLAN = SpeculationPlan(k=2, budget=6)


def test_tokens_of_a_round_are_the_accepted_ones_and_the_bonus():
    assert tokens([]) == 1
    assert tokens([0.5, 0.5]) == 1.75
    assert tokens([0.8, 0.5, 0.0, 1.0]) == pytest.approx(1 + 0.8 + 0.4)


def test_ar_gives_a_token_a_row_in_each_forward():
    assert ar(COSTS) == 1.0
    assert ar(COSTS, rows=3) == 3.0
    assert ar(Costs(verify={8: 2.0})) == 0.5  # where everything runs at the widest
    assert ar(Costs(verify={0: 1.0}, ahead=0.8)) == 1.25  # the host works meanwhile


def test_a_round_of_sd_drafts_before_it_verifies():
    assert sd(COSTS, HALF, SpeculationPlan(k=2)) == pytest.approx(1.75 / (1.5 + 2 * 0.1))
    assert sd(COSTS, HALF, SpeculationPlan(k=2), rows=2) == pytest.approx(2 * 1.75 / 1.7)


def test_a_measured_round_of_sd_has_the_work_of_the_host():
    costs = Costs(verify={0: 1.0, 2: 1.1, 8: 2.0}, draft=0.1, rounds={1: 1.4, 8: 3.1})
    rounds = [costs.sd_round(k) for k in (1, 2, 7, 8)]
    assert rounds == pytest.approx([1.4, 2.5, 3.0, 3.1])
    assert costs.host == pytest.approx(1.4 - 1.1 - 0.1)
    assert sd(costs, HALF, SpeculationPlan(k=1)) == pytest.approx(1.5 / 1.4)
    assert Costs(verify={0: 1.0}).host == 0


def test_the_host_works_in_rounds_of_ssd_as_in_those_of_sd():
    plan = SpeculationPlan(k=2, budget=6)
    with_host = dataclasses.replace(COSTS, rounds={4: 1.5 + 4 * 0.1 + 0.7})
    assert COSTS.ssd_round(plan, 2) == 1.5
    assert with_host.ssd_round(plan, 2) == pytest.approx(1.5 + 0.7)
    assert with_host.ssd_round(plan, 2, 2) == pytest.approx(1.5 + 0.7 + 2 * 0.2)


def test_a_round_takes_at_least_its_verification():
    disturbed = Costs(verify={0: 1.0, 8: 2.0}, draft=0.5, rounds={8: 2.5})
    assert disturbed.sd_round(1) == 2.0


def test_a_verification_costs_what_the_next_width_costs():
    costs = Costs(verify={0: 1.0, 2: 1.1, 8: 2.0})
    assert [costs.verify_seconds(length) for length in (0, 1, 2, 3, 8)] == [1.0, 1.1, 1.1, 2.0, 2.0]


def test_misses_follow_the_power_law():
    guess = Guess(single_miss=0.6, r=2.0)
    assert [throughput.miss_rate(count, guess) for count in (0, 1, 2)] == [
        1,
        0.6,
        pytest.approx(0.15),
    ]


def test_the_hit_rate_weighs_the_counts_by_the_outcomes():
    """P = (1/2, 1/4, 1/4) and two branches each, which miss once in four."""
    assert throughput.hit_rate(HALF, UniformFanOut(), 2, 6, "hit") == pytest.approx(0.75)
    # P = (1/2, 1/2) and three branches each.
    assert throughput.hit_rate(HALF, UniformFanOut(), 1, 6, "hit") == pytest.approx(1 - 0.5 / 3)
    # (3, 2, 2) of seven.
    expected = 1 - 0.5 * (0.5 / 3 + 0.25 / 2 + 0.25 / 2)
    assert throughput.hit_rate(HALF, UniformFanOut(), 2, 7, "hit") == pytest.approx(expected)


def test_rounds_with_a_draft_just_in_time_wait_after_a_miss():
    """After records of two tokens: hits of k < 2 with 9/16, of k = 2 with 3/16, misses with 4/16.
    After one token, which is what a branch of k = 2 has: 5/12, 5/12 and 2/12."""
    full, back = 9 / 37, 17 / 74
    gained = 1.75 * (1 - full) + 1.5 * full
    waited = 1.5 + back * 2 * 0.2
    found = ssd(COSTS, HALF, PLAN, UniformFanOut(), waits=True)
    assert found == pytest.approx(gained / waited)
    for contention, more in ((1.0, 2 * 0.3), (0.5, 0.3)):
        shared = dataclasses.replace(COSTS, contention=contention)
        found = ssd(shared, HALF, PLAN, UniformFanOut(), waits=True)
        assert found == pytest.approx(gained / (waited + more))
    slow = dataclasses.replace(COSTS, step={6: 1.0})
    found = ssd(slow, HALF, PLAN, UniformFanOut(), waits=True)
    assert found == pytest.approx(gained / (2.0 + back * 2 * 0.2))
    found = ssd(dataclasses.replace(slow, contention=0.5), HALF, PLAN, UniformFanOut(), waits=True)
    assert found == pytest.approx(gained / (2.0 + 0.5 * 1.5 + back * 2 * 0.2))


def test_a_batch_waits_as_soon_as_one_row_missed():
    back = 17 / 74
    one, three = (ssd(COSTS, HALF, PLAN, UniformFanOut(), waits=True, rows=rows) for rows in (1, 3))
    gained = one * (1.5 + back * 0.4)
    assert three == pytest.approx(3 * gained / (1.5 + (1 - (1 - back) ** 3) * 0.4))


def test_rounds_without_a_backup_propose_nothing_after_a_miss():
    """Then all six branches are for the next token, and miss once in twelve."""
    early, late = (9 / 16, 3 / 16, 4 / 16), (5 / 12, 5 / 12, 2 / 12)
    chances = (early, late, (0.0, 11 / 12, 1 / 12))
    share = [1 / 3] * 3
    for _ in range(200):
        share = [sum(share[i] * chances[i][j] for i in range(3)) for j in range(3)]
    gained = share[0] * 1.75 + share[1] * 1.5 + share[2]
    seconds = (share[0] + share[1]) * 1.5 + share[2]
    found = ssd(COSTS, HALF, PLAN, UniformFanOut(), waits=False)
    assert found == pytest.approx(gained / seconds)


def test_a_single_token_takes_two_forwards_of_the_branches():
    """So that those of k = L have one, too: every record is one token long."""
    costs = Costs(verify={0: 1.0, 1: 1.0}, step={4: 0.7})
    never = Guess(acceptance=0.5, single_miss=0.0)
    found = ssd(costs, never, SpeculationPlan.of_branches(1, 4), UniformFanOut(), waits=True)
    assert found == pytest.approx(1.5 / 1.4)


def test_theorem_7_where_hits_and_misses_are_alike():
    """Without the tail rule's shorter branches (K is 1) every round hits with the same chance."""
    costs = Costs(verify={0: 2.0, 1: 2.0}, backup=0.6, step={2: 1.5})
    p_hit = 0.5 * (1 - 0.5) + 0.5 * (1 - 0.5)
    gain = 1.5 / (p_hit * max(1, 3.0 / 2) + (1 - p_hit) * (max(1, 3.0 / 2) + 0.6 / 2))
    found = ssd(costs, HALF, SpeculationPlan.of_branches(1, 2), UniformFanOut(), waits=True)
    assert found / ar(costs) == pytest.approx(gain)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("a", [0.1, 0.6, 0.95])
def test_a_draft_that_is_hidden_is_never_slower_than_one_that_is_waited_for(k, a):
    """Corollary 8, as far as branches of k = L do not propose a token less."""
    costs = Costs(verify={0: 1.0, 8: 1.0}, draft=0.1, backup=0.1, step={16: 0.1})
    branches = SpeculationPlan(k=k, budget=16, longer=True)
    for single_miss in (0.0, 0.3, 1.0):
        seen = Guess(acceptance=a, single_miss=single_miss)
        hidden = ssd(costs, seen, branches, GeometricFanOut(), waits=True)
        assert hidden >= sd(costs, seen, SpeculationPlan(k=k)) - 1e-12
    never = Guess(acceptance=a, single_miss=1.0, r=0.0)
    hidden = ssd(costs, never, branches, GeometricFanOut(), waits=True)
    assert hidden == pytest.approx(sd(costs, never, SpeculationPlan(k=k)))


def rate(*, k=3, budget=8, a=0.7, single_miss=0.4, verify=1.0, step=0.1, backup=0.1, waits=True):
    costs = Costs(verify={0: verify, 8: verify}, backup=backup, step={budget: step})
    seen = Guess(acceptance=a, single_miss=single_miss)
    plan = SpeculationPlan(k=k, budget=budget)
    return ssd(costs, seen, plan, GeometricFanOut(acceptance=a), waits=waits)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("name", "values", "rises"),
    [
        ("a", (0.1, 0.5, 0.8, 0.95), True),
        ("budget", (4, 8, 16, 64), True),
        ("single_miss", (0.0, 0.2, 0.5, 1.0), False),
        ("verify", (0.5, 1.0, 2.0), False),
        ("step", (0.4, 0.6, 1.0), False),
    ],
)
def test_speeds_rise_and_fall_with_what_they_depend_on(name, values, rises, waits):
    found = [rate(**{name: value}, waits=waits) for value in values]
    pairs = itertools.pairwise(found if rises else reversed(found))
    assert all(one < other for one, other in pairs)


def test_a_backup_that_is_waited_for_costs():
    assert rate(backup=0.1) > rate(backup=0.3) > rate(backup=1.0)
    assert rate(backup=0.1, waits=False) == rate(backup=1.0, waits=False)


def test_the_best_k_of_sd_balances_acceptance_and_cost():
    cheap = Costs(verify={0: 1.0, 8: 1.1}, draft=0.01)
    dear = dataclasses.replace(cheap, draft=0.9)
    ks = range(1, 9)
    assert best_sd(cheap, Guess(acceptance=0.95), ks)[0].k == 8
    assert best_sd(dear, Guess(acceptance=0.5), ks)[0].k == 1
    plan, found = best_sd(cheap, Guess(acceptance=0.6), ks)
    rates = [sd(cheap, Guess(acceptance=0.6), SpeculationPlan(k=k)) for k in ks]
    assert found == max(rates)
    assert plan.k == 1 + rates.index(found)
    nothing = Costs(verify={0: 1.0, 8: 1.0})
    assert best_sd(nothing, Guess(acceptance=0.0), ks)[0].k == 1  # all alike


def test_more_branches_are_taken_as_long_as_they_hide():
    budgets, verify = (4, 8, 16), {0: 1.0, 8: 1.0}
    flat = Costs(verify=verify, backup=0.2, step=dict.fromkeys(budgets, 0.1))
    steep = Costs(verify=verify, backup=0.2, step={4: 0.3, 8: 0.6, 16: 1.2})
    settings = {"ks": (3,), "budgets": budgets, "waits": (True, False)}
    assert best_ssd(flat, Guess(), GeometricFanOut(), **settings)[0].budget == 16
    assert best_ssd(steep, Guess(), GeometricFanOut(), **settings)[0].budget == 4
    plan, found = best_ssd(flat, Guess(), GeometricFanOut(), **settings | {"ks": (1, 2, 3)})
    assert found == max(
        ssd(flat, Guess(), SpeculationPlan.of_branches(k, m), GeometricFanOut(), waits=waits)
        for k in (1, 2, 3)
        for m in budgets
        for waits in (True, False)
    )
    assert plan == SpeculationPlan.of_branches(plan.k, plan.budget)


def test_observed_steps_tell_of_those_that_were_not_run():
    costs = Costs(verify={0: 1.0}, step={4: 0.2, 8: 0.4, 16: 0.8})
    assert costs.with_observed_steps({}).step == pytest.approx(costs.step)
    assert costs.with_observed_steps({8: 0.6}).step == pytest.approx({4: 0.3, 8: 0.6, 16: 1.2})
    assert costs.with_observed_steps({5: 9.0}).step == pytest.approx(costs.step)


def test_steps_are_observed_while_the_target_is_busy():
    costs = Costs(verify={0: 1.0}, step={4: 0.2, 8: 0.4}, contention=0.5)
    observed = costs.with_observed_steps({4: 0.3})
    assert observed.step == pytest.approx(costs.step)
    assert observed.contention == 0.5


@pytest.mark.parametrize(
    ("overlapped", "expected"), [(2.0, 0.0), (1.9, 0.0), (2.5, 1.0), (2.25, 0.5), (3.0, 2.0)]
)
@pytest.mark.parametrize("alone", [(0.5, 2.0), (2.0, 0.5)])
def test_contention_is_what_two_at_once_take_longer_than_the_longer(alone, overlapped, expected):
    found = throughput.contention(*alone, overlapped)
    assert found == pytest.approx(expected)
    again = Costs(verify={}, contention=found).overlapped(*alone)
    assert again == pytest.approx(max(overlapped, 2.0))


def test_contention_that_no_two_roles_have_is_not_believed():
    assert throughput.contention(0.001, 1.0, 2.0) == 2.0


FLAWS = {
    "the tail rule is forgotten": ("ssd", "min(forwards - 1, k)", "k"),
    "a shared device hides the draft": (
        "ssd",
        "costs.ssd_round(plan, length)",
        "max(costs.verify_seconds(length), forwards * costs.step[plan.budget])",
    ),
    "a miss waits for one token": ("ssd", "* k * costs.backup", "* costs.backup"),
    "tokens are accepted alike": (
        "_transition",
        "observations.rates(length, after)",
        "[0.8] * length",
    ),
    "kinds of rounds count alike": ("_stationary", "np.eye(size)[0])", "np.eye(size)[1])"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_planted_flaws_of_predictions_are_caught(flaw, monkeypatch):
    function, old, new = FLAWS[flaw]
    with edited([Edit(throughput, function, old, new)]):
        monkeypatch.setitem(globals(), "ssd", throughput.ssd)
        with pytest.raises(AssertionError):
            test_rounds_with_a_draft_just_in_time_wait_after_a_miss()
