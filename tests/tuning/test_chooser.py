"""Which mode is taken, by costs that are given."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_BUDGETS, AUTO_K
from ssd_jax.devices.programs import lookup
from ssd_jax.errors import InputError
from ssd_jax.speculation.fan_out import VerificationStats
from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.system import stored_jit
from ssd_jax.tuning import opening
from ssd_jax.tuning.chooser import Chooser
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.opening import first_guess, open_chooser
from ssd_jax.tuning.throughput import Costs, Guess, Prediction
from ssd_jax.tuning.tuners import UpdatedGuess
from tests.loading.variation import resolved_of

WIDTHS = (0, 2, 4, 8)
NOWHERE = CostFile(None, {})


def costs(draft, step=None, *, verify=1.0):
    steps = dict.fromkeys(AUTO_BUDGETS, draft if step is None else step)
    return Costs(verify=dict.fromkeys(WIDTHS, verify), draft=draft, backup=draft, step=steps)


def chosen(costs, guess=None, *, draft="d", **settings):
    config = Config(mode="auto", target="t", draft=draft, **settings)
    return opened(config, KnownCosts(costs, guess or Guess()), NOWHERE)


def opened(config, known, file):
    """A chooser among what is prepared for a draft in the target's process."""
    return Chooser(config, known, budgets=config.budgets_at(), file=file)


def test_a_draft_as_slow_as_the_target_is_not_used():
    found = chosen(costs(1.0))
    assert found.mode == "ar"
    assert found.line.startswith("mode auto takes ar: predicted tokens/s are ar 1.0; sd 0.9 with")


@pytest.mark.parametrize("draft", [0.2, 0.5, 0.7])
def test_the_acceptance_from_which_a_draft_pays_is_said_and_what_a_verification_costs(draft):
    """As with experts, of which more rows use more."""
    dear = Costs(verify={0: 1.0, 2: 1.3, 4: 1.6, 8: 2.4}, draft=draft)

    def found(acceptance, given=dear):
        return chosen(given, Guess(acceptance=acceptance), draft="ngram")

    match = re.search(r"; a draft pays from (\S+) on, and verifying (\d) tok", found(0.7).line)
    least = float(match[1])
    assert [found(each).mode for each in (least - 0.01, least)] == ["ar", "sd"]
    times = dear.verify_seconds(int(match[2]))
    assert f"takes {times:.2f} times as long as a forward of one" in found(0.7).line


def test_a_draft_that_pays_at_no_acceptance_is_said_to():
    assert "; a draft pays at none, and verifying " in chosen(costs(9.0)).line


def test_a_mode_that_is_not_taken_although_it_is_faster_is_named():
    """Its gain of a few percent is less than what predictions leave out."""
    found = [chosen(costs(percent / 100, percent / 50)) for percent in range(26, 34)]
    near = [choice for choice in found if "less than 3% faster" in choice.line]
    assert 0 < len(near) < len(found)
    for choice in near:
        fastest = max(choice.predicted, key=lambda mode: choice.predicted[mode].rate)
        assert f"; {fastest} is less than 3% faster than a simpler mode)" in choice.line
        assert choice.mode != fastest


def test_a_cheap_draft_speculates_while_the_target_verifies():
    found = chosen(costs(0.1))
    assert found.mode == "ssd"
    rates = {mode: prediction.rate for mode, prediction in found.predicted.items()}
    assert rates["ssd"] > rates["sd"] > rates["ar"] == 1.0
    plan = found.predicted["ssd"].plan
    assert f"ssd {rates['ssd']:.1f} with k = {plan.k}, budget = {plan.budget}" in found.line


def test_where_the_roles_wait_for_each_other_branches_cost_what_they_do():
    found = costs(0.1, 0.2)
    assert chosen(found).mode == "ssd"
    assert chosen(dataclasses.replace(found, contention=1.0)).mode == "sd"


def test_a_draft_that_is_never_right_is_not_used():
    assert chosen(costs(0.1), Guess(acceptance=0.02)).mode == "ar"


def test_a_mode_must_be_faster_than_a_simpler_one_by_more_than_what_is_not_predicted():
    guess = Guess(acceptance=0.5)
    for verify, mode in ((1.44, "sd"), (1.47, "ar")):
        wide = Costs(verify={0: 1.0, 1: verify}, draft=0.0, backup=0.0, step={8: 9.0})
        found = chosen(wide, guess, k="1", budget="8")
        assert found.predicted["sd"].rate > 1
        assert found.mode == mode


@pytest.mark.parametrize(
    ("sd", "ssd", "mode"), [(1.02, 1.04, "ar"), (1.02, 1.06, "ssd"), (1.1, 1.12, "sd")]
)
def test_ssd_must_beat_the_better_of_ar_and_sd_even_one_that_is_not_taken(
    monkeypatch, sd, ssd, mode
):
    def tuner(self, mode, _k, _observations):
        rate = {"sd": sd, "ssd": ssd}[mode]
        return SimpleNamespace(best=lambda _rows: Prediction(SpeculationPlan(k=4), rate))

    monkeypatch.setattr(Chooser, "_new_tuner", tuner)
    assert chosen(costs(0.1)).mode == mode


def test_with_n_grams_it_is_sd_or_ar():
    wide = Costs(verify={0: 1.0, 2: 1.05, 4: 1.1, 8: 1.3})
    found = chosen(wide, Guess(acceptance=0.4), draft="ngram")
    assert (found.mode, set(found.predicted)) == ("sd", {"ar", "sd"})
    dear = Costs(verify={0: 1.0, 2: 2.0, 4: 3.0, 8: 5.0})
    assert chosen(dear, Guess(acceptance=0.4), draft="ngram").mode == "ar"


def test_the_first_guess_is_what_a_draft_says_of_itself():
    def opened(acceptance):
        return SimpleNamespace(checkpoint=SimpleNamespace(acceptance=acceptance))

    assert first_guess(opened(0.485)).acceptance == 0.485
    assert first_guess(opened(0.0)).acceptance == 0.0
    assert first_guess(opened(None)) == Guess()
    assert first_guess(None, "ngram").acceptance == 0.4


def test_a_short_text_does_not_outweigh_what_a_draft_says_of_itself():
    draft = SimpleNamespace(checkpoint=SimpleNamespace(acceptance=0.64))
    seen = UpdatedGuess(first_guess(draft))
    for _ in range(30):
        seen.observe(VerificationStats(accepted=0, length=1, after="miss"))
    assert 0.59 < seen.guess.acceptance < 0.62
    later = UpdatedGuess(seen.guess)
    for _ in range(3000):
        later.observe(VerificationStats(accepted=0, length=1, after="miss"))
    assert later.guess.acceptance < 0.15


def test_a_mode_or_k_that_was_given_is_not_chosen():
    settings = {"k": "3", "budget": "8"}
    found = chosen(Costs(verify={0: 1.0, 3: 1.0}, draft=0.1, backup=0.1, step={8: 0.1}), **settings)
    assert (found.predicted["ssd"].plan.k, found.predicted["ssd"].plan.budget) == (3, 8)
    assert found.predicted["sd"].plan.k == 3


def test_a_model_of_mode_ssd_predicts_no_other_and_stays_in_it():
    config = Config(mode="ssd", target="t", draft="d", budget="auto")
    steps = dict.fromkeys(AUTO_BUDGETS, 5.0)
    slow = Costs(verify={0: 1.0, 4: 1.0}, backup=5.0, step=steps)
    assert opened(config, KnownCosts(slow, Guess()), NOWHERE).mode == "ssd"


def test_engines_get_a_tuner_of_their_mode_over_what_is_prepared():
    found = chosen(costs(0.1))
    sd, ssd = (found.tuner(mode, AUTO_K) for mode in ("sd", "ssd"))
    assert sd.plan(rows=1, steps=dict).budget == 0
    assert ssd.plan(rows=1, steps=dict).budget in AUTO_BUDGETS
    assert found.tuner("sd", 2).plan(rows=1, steps=dict).k == 2  # a K that was asked for


def test_n_grams_cost_nothing_to_draft():
    found = chosen(Costs(verify={0: 1.0, 2: 1.05, 4: 1.1, 8: 1.3}), draft="ngram")
    assert found.tuner("sd", AUTO_K).plan(rows=1, steps=dict).k == AUTO_K


def test_an_engines_observations_are_known_at_the_next_start(tmp_path):
    file = CostFile(tmp_path, {"models": "a"})
    known = KnownCosts(costs(0.1), Guess())
    config = Config(mode="auto", target="t", draft="d")
    first = opened(config, known, file)
    first.close()
    assert list(tmp_path.iterdir()) == []  # nothing was observed
    assert first.mode == "ssd"
    tuner = first.tuner("ssd", AUTO_K)
    for _ in range(400):
        tuner.observe(VerificationStats(0, 8, "hit", 2, None))
    first.close()
    again = file.read(widths=WIDTHS, budgets=AUTO_BUDGETS)
    assert again.costs == known.costs
    assert again.guess.acceptance < 0.05
    assert again.guess.single_miss > 0.9
    assert opened(config, again, file).mode == "ar"


def test_a_process_that_has_seen_less_leaves_what_another_has_kept(tmp_path):
    file = CostFile(tmp_path, {"models": "a"})
    known = KnownCosts(costs(0.1), Guess())
    long, short = (
        opened(Config(mode="auto", target="t", draft="d"), known, file) for _ in range(2)
    )
    for llm, rounds, accepted in ((long, 400, 0), (short, 2, 8)):
        tuner = llm.tuner("ssd", AUTO_K)
        for _ in range(rounds):
            tuner.observe(VerificationStats(accepted, 8, "hit", 2, None))
        llm.close()
    assert file.read(widths=WIDTHS, budgets=AUTO_BUDGETS).guess == long._observations.guess


def test_observations_beside_sampled_rows_are_not_kept_for_the_next_start(tmp_path):
    """Through time it depends on their noise, which a request of the next process may share."""
    file = CostFile(tmp_path, {"models": "a"})
    config, known = Config(mode="auto", target="t", draft="d"), KnownCosts(costs(0.1), Guess())

    def after(before, beside):
        first = opened(config, known, file)
        tuner = first.tuner("ssd", AUTO_K)
        for _ in range(before):
            tuner.observe(VerificationStats(4, 8, "hit", 2, 0))
        first.freeze_observations()
        for _ in range(beside):
            tuner.observe(VerificationStats(0, 8, "hit", 2, None))
        first.close()
        return file.read(widths=WIDTHS, budgets=AUTO_BUDGETS)

    assert after(0, 50) is None
    assert after(50, 50) == after(50, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "auto"}, "mode = 'auto' finds out whether a draft pays; give one"),
        (
            {"mode": "auto", "draft": "ngram", "budget": "8"},
            "budget = 8 means nothing with draft = 'ngram'",
        ),
        (
            {"mode": "ssd", "draft": "d", "budget": "auto", "fan_out": "1,1,1,1,12"},
            "budget is chosen while decoding",
        ),
        (
            {"mode": "auto", "draft": "d", "fan_out": "1,1,1,1,12"},
            "k and budget are chosen while decoding",
        ),
    ],
)
def test_settings_that_cannot_be_chosen_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Config(target="t", **settings)


def test_only_what_is_asked_for_is_prepared():
    def prepared(**settings):
        config = Config(target="t", draft="d", **settings)
        resolved = resolved_of(config)
        return config.prepared, config.speculated, resolved.budgets, resolved.chooses

    assert prepared(mode="ssd") == ("ssd", 4, (16,), False)
    assert prepared(mode="ssd", budget="auto") == ("ssd", 4, AUTO_BUDGETS, True)
    assert prepared(mode="ssd", k="auto", budget="8") == ("ssd", AUTO_K, (8,), True)
    assert prepared(mode="sd", k="auto") == ("sd", AUTO_K, (), True)
    assert prepared(mode="auto") == ("ssd", AUTO_K, AUTO_BUDGETS, True)
    assert prepared(mode="auto", k="3", budget="8") == ("ssd", 3, (8,), True)


@pytest.mark.parametrize(
    "other",
    [
        *("versions", "cpu_model", "cpu_affinity", "usable_cores"),
        *("sources", "flags", "handlers", "identity", "exact", "context", "dtype"),
    ],
)
def test_costs_of_another_version_processor_or_room_are_measured_anew(tmp_path, monkeypatch, other):
    measured = []

    def measure(loaded, context):
        measured.append((loaded.exact, context))
        return costs(0.5)

    monkeypatch.setattr(opening, "measure", measure)
    monkeypatch.setattr(opening, "measure_target", lambda loaded: costs(0.5))
    config = Config(target="t", mode="auto", draft="d", compile_cache=str(tmp_path))
    model = SimpleNamespace(identity="f w")
    exact, context = "distribution", 64
    parts = {
        "sources": (lookup, "_sources_digest"),
        "flags": (stored_jit, "_flags"),
        "handlers": (lookup.handlers, "why_missing"),
    }
    monkeypatch.setattr(*parts["handlers"], lambda: None)
    for _ in range(2):
        for _ in range(2):
            resolved = resolved_of(config, target=model, context=context)
            programs = SimpleNamespace(widths=WIDTHS)
            open_chooser(
                SimpleNamespace(config=config, resolved=resolved, programs=programs, exact=exact)
            )
        if other in ("exact", "context"):
            exact, context = ("bitwise", 64) if other == "exact" else ("distribution", 128)
        elif other == "identity":
            model.identity = "f others"
        elif other == "dtype":  # of the same files, and all sizes are the same
            config = dataclasses.replace(config, dtype="int8")
        elif other in parts:
            monkeypatch.setattr(*parts[other], lambda: ("another",))
        else:
            monkeypatch.setattr(opening, other, lambda: "another")
    assert len(measured) == 2
