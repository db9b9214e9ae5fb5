"""Costs of the batch size that rounds run with, measured or worked out, and what follows."""

import dataclasses

import pytest

from ssd_jax.config.config import Config
from ssd_jax.engine.rounds.timer import TimedRound
from ssd_jax.tuning.batch_costs import costs_of_batch
from ssd_jax.tuning.chooser import Chooser
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.throughput import Costs, Guess

SLOTS = 64
WIDTHS = (0, 2, 4, 8)


def machine(fixed, of_token, slots, *, draft=0.1, host=0.5):
    """Costs where a forward takes a fixed part and one for each of its tokens."""

    def forward(tokens):
        return fixed + of_token * slots * tokens

    verify = {width: forward(width + 1) for width in WIDTHS}
    return Costs(
        verify=verify,
        ahead=0.9 * verify[0],
        draft=draft * verify[0],
        rounds={k: host + verify[k] + k * draft * verify[0] for k in (2, 8)},
        backup=draft * verify[0],
        step={m: draft * forward(m) for m in (4, 16)},
    )


@pytest.mark.parametrize("batch", [1, 4, 32])
def test_costs_of_few_slots_follow_from_those_of_all(batch):
    all_slots, few = machine(3.0, 0.01, SLOTS), machine(3.0, 0.01, batch)
    found = costs_of_batch(all_slots, batch, SLOTS)
    for name in ("verify", "rounds", "step"):
        assert getattr(found, name) == pytest.approx(getattr(few, name)), name
    for name in ("ahead", "draft", "backup", "host"):
        assert getattr(found, name) == pytest.approx(getattr(few, name)), name


def test_costs_that_were_measured_are_taken_and_those_of_all_slots_where_none_are_known():
    few = machine(9.0, 0.0, 1)
    all_slots = dataclasses.replace(machine(3.0, 0.01, SLOTS), few={1: few})
    assert costs_of_batch(all_slots, 1, SLOTS) is few
    for batch in (0, SLOTS):
        assert costs_of_batch(all_slots, batch, SLOTS) is all_slots


def test_no_cost_is_negative_where_more_tokens_cost_out_of_proportion():
    costs = Costs(verify={0: 1.0, 8: 100.0}, draft=0.1, step={4: 1.0, 16: 90.0})
    found = costs_of_batch(costs, 1, SLOTS)
    assert min(*found.verify.values(), *found.step.values(), found.draft) > 0
    assert costs_of_batch(Costs(verify={0: 1.0}), 1, SLOTS).verify == {0: 1.0}


CONFIG = Config(mode="auto", target="t", draft="ngram", slots=SLOTS)


def chooser(costs, config=CONFIG):
    known = KnownCosts(costs, Guess(acceptance=0.6))
    return Chooser(config, known, budgets=(), file=CostFile(None, {}))


def test_k_is_chosen_by_the_costs_of_the_size_that_rounds_run():
    """One request's tokens cost next to nothing beside the weights; those of 64 cost."""
    chosen = chooser(machine(3.0, 0.05, SLOTS, draft=0.0))
    tuner, timer = chosen.tuner("sd", 8), chosen.timer("sd", 8)

    def k_after(batch):
        for _ in range(16):
            timer._report(TimedRound(2, False, 1.0, rows=1, batch=batch))
            tuner.plan(rows=1, steps=dict)
        return tuner.plan(rows=1, steps=dict).k

    many, few = k_after(SLOTS), k_after(1)
    assert few > many
    assert k_after(SLOTS) == many


def test_a_planner_begins_with_the_mode_that_is_predicted_for_each_size():
    chosen = chooser(machine(3.0, 0.2, SLOTS, draft=0.0))
    assert chosen.mode == "ar"
    planner = chosen.planner("sd", 8)
    modes = {slots: planner.plan(slots).mode for slots in (1, 2, 16, 64)}
    assert modes[1] == modes[2] == "sd"
    assert modes[64] == "ar"
