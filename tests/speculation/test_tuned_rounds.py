"""K and M that change from round to round, on scripted roles: speed may change, no text does."""

import dataclasses

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.speculation.fan_out import MeasuredFanOut, VerificationStats
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters
from ssd_jax.tuning.throughput import Costs, Guess
from ssd_jax.tuning.tuners import FastestTuner, UpdatedGuess
from tests.engine.letters import LONG, drain, outputs, request, spell
from tests.fakes.branching import FakeBranchingDraft, GrowingBranches
from tests.fakes.instrument import instrument
from tests.fakes.tuners import Restless
from tests.speculation.traffic import PREDICTORS, REQUESTS, results, script
from tests.speculation.watched import EOS, ssd

KS, BUDGETS = (1, 2, 3), (2, 5, 9)
COSTS = Costs(verify={0: 1.0, 3: 1.0}, draft=0.1, backup=0.1, step={8: 0.1})


class Obedient(FakeBranchingDraft):
    """A draft that checks that it gets as many branches as the last plan says."""

    tuner: Restless

    def branch_off(self, counts, *, follow, lowered, forwards, skip=None):
        plan = self.tuner.plans[-1]
        self._budget = plan.budget
        assert forwards <= plan.forwards
        super().branch_off(counts, follow=follow, lowered=lowered, forwards=forwards)


def restless(text=script, *, seed=0, **settings):
    tuner = Restless(KS, BUDGETS, seed)
    parts = ssd(text, k=max(KS), budget=max(BUDGETS), tuner=tuner, draft=Obedient, **settings)
    parts.draft.tuner = tuner
    return parts, tuner


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("backup", ["none", "ngram", "draft"])
@pytest.mark.parametrize("fan_out", ["uniform", "measured"])
def test_text_is_that_of_plain_decoding(predictor, backup, fan_out):
    plain = Engine(FakeTarget(script, context=28), Letters, frozenset({EOS}), clock=Clock())
    expected = results(plain)
    for seed in range(3):
        parts, tuner = restless(
            seed=seed,
            rank=PREDICTORS[predictor],
            backup=backup,
            fan_out=fan_out,
            context=28,
            wrong=lambda position: position % 5 == 3,
        )
        assert results(parts.engine, REQUESTS) == expected
        assert {(plan.k, plan.budget) for plan in tuner.plans} >= {(1, 2), (3, 9)}


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        # Branches behind a rejected token have one more than K = 1.
        ({"wrong": lambda position: position % 3 == 1}, "hit"),
        ({"rank": lambda prompt, position: None, "backup": "random"}, "miss"),
    ],
)
def test_branches_and_backups_propose_no_more_than_the_plan_says(settings, source):
    parts, tuner = restless(spell(LONG), **settings)
    parts.engine.add(request(max_tokens=60))
    drain(parts.engine)
    planned = zip(parts.controller.rounds, [tuner.plans[0], *tuner.plans], strict=False)
    lengths = [(int(drafted.lengths[0]), plan.k) for (_, drafted), plan in planned]
    assert all(length <= k for length, k in lengths)
    assert lengths.count((1, 1)) > 2
    assert source in parts.controller.sources()


def test_rounds_propose_no_more_than_the_plan_says_and_the_tuner_hears_of_each():
    parts, tuner = restless(spell(LONG))
    parts.engine.add(request(max_tokens=60))
    (output,) = outputs(drain(parts.engine)).values()
    assert output.text == LONG[:60]
    # A plan is made while a round is verified, and is that of the next round's branches, of which
    # the one after it proposes tokens. The first plan is made in the beginning.
    lengths = parts.controller.lengths()
    for length, plan in zip(lengths, [tuner.plans[0], *tuner.plans], strict=False):
        assert length <= plan.k
    assert len(set(lengths)) > 1
    assert [outcome.length for outcome in tuner.seen] == [0, *lengths[: len(tuner.seen) - 1]]
    assert all(outcome.rank == 0 for outcome in tuner.seen)
    assert all(outcome.accepted == outcome.length for outcome in tuner.seen)


@pytest.mark.parametrize("asks_first", [False, True])
def test_the_next_forward_waits_for_no_learning(monkeypatch, asks_first):
    """Neither of the tuner nor, unless branches are asked for first, of the policies."""
    parts, tuner = restless(
        fan_out="measured", wrong=lambda position: position % 3 == 0, asks_first=asks_first
    )
    steps, learn = [], MeasuredFanOut.observe
    instrument(parts.target, note={"forward": steps})
    instrument(tuner, note={"plan": steps, "observe": steps})
    monkeypatch.setattr(
        MeasuredFanOut, "observe", lambda *of: (steps.append("learn"), learn(*of))[1]
    )
    parts.engine.add(request(max_tokens=40))
    drain(parts.engine)
    rounds = " ".join(steps).split("forward")[1:]
    assert len(rounds) > 5
    expected = " observe plan learn " if asks_first else " learn observe plan "
    assert rounds[1:-2] == [expected] * (len(rounds) - 3)


def test_a_fixed_plan_changes_nothing():
    parts = ssd(spell(LONG), k=3, budget=8)
    same = ssd(spell(LONG), k=3, budget=8, tuner=FixedTuner(SpeculationPlan(k=3, budget=8)))
    for engine in (parts, same):
        engine.engine.add(request(max_tokens=60))
        drain(engine.engine)
    assert parts.controller.lengths() == same.controller.lengths()
    assert parts.draft.expansions == same.draft.expansions


def sd(tuner, text=LONG, rule="ratio", **scripted):
    drafter = FakeDrafter(spell(text), k=8, **scripted)
    tuned = TunedDrafter(drafter, tuner, rule=rule)
    target = FakeTarget(spell(text))
    engine = Engine(target, Letters, frozenset({EOS}), drafter=tuned, clock=Clock())
    return engine, drafter


def test_mode_sd_proposes_what_the_plan_says():
    tuner = Restless((1, 4, 8), (0,))
    engine, drafter = sd(tuner, wrong=lambda position: position % 7 == 0)
    engine.add(request(max_tokens=50))
    (output,) = outputs(drain(engine)).values()
    assert output.text == LONG[:50]
    ks = [plan.k for plan in tuner.plans]
    assert set(drafter.limits) > {1, 4}
    assert all(limit <= k for limit, k in zip(drafter.limits, ks, strict=True))


def test_mode_sd_observes_what_was_accepted_and_counts_nothing_proposed_as_rejected():
    tuner = Restless((3,), (0,))
    engine, _ = sd(
        tuner,
        wrong=lambda position: position == 5,
        length=lambda position: 0 if position == 6 else 3,
    )
    engine.add(request(max_tokens=12))
    drain(engine)
    # Position 3 by the prefill; 4, then 5 for a wrong one; nothing, and 6; 7 8 9 and 10; the rest.
    assert tuner.seen[:3] == [
        VerificationStats(1, 3, "miss"),
        VerificationStats(0, 1, "miss"),
        VerificationStats(3, 3, "miss"),
    ]


def test_another_request_in_the_slot_is_not_judged_by_the_last_one():
    tuner = Restless((3,), (0,))
    engine, drafter = sd(tuner)
    for _ in range(4):
        engine.add(request(max_tokens=3))  # a single round each
    drain(engine)
    assert drafter.limits == [1] * 4
    assert tuner.seen == []


TAUGHT = [  # temperature, rule, whether the tuner may hear of it
    (0.0, "ratio", True),
    (1.0, "ratio", False),
    (0.0, "block", True),
    (1.0, "block", False),
    (0.0, "coupled", True),
    (1.0, "coupled", True),
]


@pytest.mark.parametrize(("temperature", "rule", "taught"), TAUGHT)
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_text_that_depends_on_lengths_teaches_the_tuner_nothing(mode, temperature, rule, taught):
    """Else accept counts of one request would choose what another with the same noise proposes."""
    observed = UpdatedGuess(Guess())
    before = observed.guess, observed.r, observed.rates(3, "miss"), observed.rates(3, "hit")
    if mode == "sd":
        tuner = FastestTuner(COSTS, observed, ks=(3,))
        engine, _ = sd(tuner, rule=rule)
    else:
        fan_out = MeasuredFanOut()
        settings = {"ks": (3,), "budgets": (8,), "waits": (False,)}
        tuner = FastestTuner(COSTS, observed, fan_out=fan_out, **settings)
        engine = ssd(spell(LONG), tuner=tuner, rule=rule).engine
        before += (fan_out.counts(3, 8, "hit"),)
    engine.add(request(max_tokens=40, temperature=temperature))
    (output,) = outputs(drain(engine)).values()
    assert output.text == LONG[:40]
    after = observed.guess, observed.r, observed.rates(3, "miss"), observed.rates(3, "hit")
    if mode == "ssd":
        after += (fan_out.counts(3, 8, "hit"),)
    assert (observed.guess.judged > 0) == taught
    assert (after != before) == taught


def test_rows_that_teach_are_told_from_those_beside_them_that_do_not():
    """One request each, in turn in the same slots."""
    for temperatures in ((0.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0)):
        tuner, alone = Restless((3,), (8,)), Restless((3,), (8,))
        for listener, asked in ((tuner, temperatures), (alone, (0.0,))):
            engine = ssd(spell(LONG), tuner=listener).engine
            for temperature in asked:
                engine.add(request(max_tokens=20, temperature=temperature))
            drain(engine)
        assert tuner.seen == alone.seen != []


class Asked(Pace):
    """Waits for all there is, and keeps what it was told."""

    def __init__(self):
        super().__init__()
        self.underway = []

    def worth(self, work, tokens, usual, *, underway=0.0):
        self.underway.append(underway)
        return max(len(row) - 1 for row in tokens)


@pytest.mark.parametrize(("known", "underway"), [(True, 2.0), (False, 0.0)])
def test_the_pace_hears_how_long_the_running_forward_has_taken(known, underway):
    now = 100.0

    def activity():
        nonlocal now
        now += 10.0
        return Activity((Busy("expand", now - 7, now - 2),) if known else ())

    pace = Asked()
    parts = ssd(spell(LONG), draft=GrowingBranches, pace=pace, activity=activity, clock=lambda: now)
    parts.engine.add(request(max_tokens=40))
    (output,) = outputs(drain(parts.engine)).values()
    assert output.text == LONG[:40]
    assert len(pace.underway) > 5
    assert {*pace.underway} == {underway}
    assert max(parts.controller.lengths()) == 2  # k = L starts a forward later


@pytest.mark.parametrize("remote", [True, False])
def test_the_drafts_work_is_reported_while_the_target_is_at_work(remote):
    events = []
    report = lambda: events.append("report") or Activity()  # noqa: E731
    parts = ssd(spell(LONG), remote=remote, activity=report)
    instrument(parts.target, note={"forward": events})
    parts.engine.add(request(max_tokens=12))
    drain(parts.engine)
    assert events == ["forward", "report"] * (len(events) // 2) != []


def test_an_interrupted_rounds_work_is_not_the_next_requests():
    activities = [Activity((Busy("grow", 0.0, 1.0, [0]),), 5)]
    parts = ssd(spell(LONG), activity=lambda: activities.pop() if activities else Activity())
    parts.controller._waiting.gather()
    parts.engine.add(request(max_tokens=4))
    drain(parts.engine)
    assert not activities
    assert all(not drafted.activity.spans for _, drafted in parts.controller.rounds)


def test_plans_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SpeculationPlan(k=3).k = 4  # type: ignore[misc]
