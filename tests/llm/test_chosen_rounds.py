"""Modes, K and budgets that are chosen, on tiny models: the text is what it is without."""

import dataclasses

import jax
import numpy as np
import pytest

from ssd_jax.config import derived
from ssd_jax.engine.engine import Engine
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tuning import opening
from tests.checkpoints import tiny_pair
from tests.fakes.tuners import Restless
from tests.llm.lengths import Comparing
from tests.llm.runs import outputs, requests, run

pytestmark = pytest.mark.more  # tests/tuning has the choice, tests/speculation the rounds

BUDGETS = (3, 8)


@pytest.fixture(scope="module")
def auto(tmp_path_factory):
    """Everything is chosen but the most K; coupled, so that sampled text is that of every mode."""
    target, draft = tiny_pair.write(tmp_path_factory.mktemp("auto"), "qwen3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "AUTO_BUDGETS", BUDGETS)
        llm = LLM(
            target,
            mode="auto",
            draft=draft,
            draft_placement="inline",
            k="3",
            slots=4,
            verify="coupled",
            exact="bitwise",
            dtype="float32",
            context=320,
            compile_cache=jax.config.jax_compilation_cache_dir,
        )
        yield llm
        llm.close()


def opened_with_ngrams(llm):
    """K of n-grams is chosen, under the ratio rule."""
    return LLM(
        llm.config.target,
        mode="sd",
        draft="ngram",
        k="auto",
        context=320,
        dtype="float32",
        exact="bitwise",
        compile_cache="off",
    )


def engine_with(llm, mode, tuner):
    roles = dataclasses.replace(llm.loaded, tuner=lambda *_: tuner).roles(mode, 3)
    decoder = llm.tokenizer.open_stream
    return Engine(roles.target, decoder, llm.tokenizer.eos_ids, drafter=roles.drafter)


@pytest.mark.parametrize("mode", [pytest.param("sd", marks=pytest.mark.slow), "ssd"])
def test_text_does_not_depend_on_plans_that_change_every_round(auto, mode):
    """Greedy and sampled, with budgets of both programs and between."""
    asked = requests(auto, "coupled")
    expected = [one.token_ids for one in outputs(auto, asked, "ar")]
    budgets = (2, 3, 5, 8) if mode == "ssd" else (0,)
    tuner = Restless((1, 2, 3), budgets, seed=1)
    engine = engine_with(auto, mode, tuner)
    compared = Comparing(engine)
    found = run(engine, asked)
    assert {0, 1, 2, 3} <= set(compared.proposed)
    assert [one.token_ids for one in found] == expected
    assert {plan.k for plan in tuner.plans} == {1, 2, 3}
    assert {plan.budget for plan in tuner.plans} == set(budgets)
    lengths = np.concatenate(
        [np.nonzero(one.metrics["acceptance_histogram"] or [])[0] for one in found]
    )
    assert lengths.max() >= 2  # something was accepted
    if mode == "ssd":
        rates = [one.metrics["hit_rate"] for one in found]
        assert 0.1 < np.mean([rate for rate in rates if rate is not None]) < 1


@pytest.mark.parametrize("mode", [None, "auto", "ar", "sd", "ssd"])
def test_every_mode_says_the_same_and_which_it_is(auto, mode):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (output,) = auto.generate("to be or not to be", params, mode=mode)
    (plain,) = auto.generate("to be or not to be", params, mode="ar")
    assert output.token_ids == plain.token_ids
    assert output.metrics["mode"] == (auto.mode if mode in (None, "auto") else mode)


def test_the_choice_is_said_in_one_line(auto):
    assert auto.mode in auto.modes == ("ar", "sd", "ssd")
    assert auto.choice.startswith(f"mode auto takes {auto.mode}: predicted tokens/s are ar ")
    assert "\n" not in auto.choice


def test_the_next_start_measures_nothing_and_knows_what_was_observed(auto, monkeypatch):
    measured = auto._chooser.costs
    assert set(measured.verify) == set(auto.loaded.programs.widths)
    assert set(measured.step) == set(BUDGETS)
    assert min(*measured.verify.values(), *measured.step.values()) > 0
    assert min(measured.draft, measured.backup, measured.ahead) > 0
    assert set(measured.rounds) == {1, *measured.verify} - {0}

    def again():
        loaded = dataclasses.replace(auto.loaded, tuner=None)
        return opening.open_chooser(loaded)

    auto.generate("0101010101", SamplingParams(max_tokens=40, ignore_eos=True), mode="ssd")
    auto._chooser.close()
    with monkeypatch.context() as patch:
        patch.setattr(opening, "measure", None)
        patch.setattr(opening, "measure_target", lambda _: measured)
        known = again()
    assert known.costs == measured
    assert known._guess == auto._chooser._observations.guess != auto._chooser._guess
    file = known._file.path
    file.write_text("damaged")
    other = again()
    assert other._guess.acceptance == 0.8
    assert set(other.costs.step) == set(BUDGETS)
    assert file.read_text() != "damaged"


def test_a_model_that_cannot_be_measured_leaves_nothing_behind(auto, monkeypatch):
    closed = []

    def fail(*_):
        raise RuntimeError("no luck")

    monkeypatch.setattr(opening, "open_chooser", fail)
    monkeypatch.setattr(type(auto.loaded), "close", lambda self: closed.append(self))
    with pytest.raises(RuntimeError, match="no luck"):
        opened_with_ngrams(auto)
    assert len(closed) == 1


@pytest.fixture(scope="module")
def ngrams(auto):
    return opened_with_ngrams(auto)


def test_n_grams_of_a_chosen_k_leave_the_text_as_it_is(ngrams):
    assert ngrams.choice is None  # the mode was given
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt in ("xyxyxyxyxyxyxyxy", "one two three one two three"):
        one, other = (ngrams.generate(prompt, params, mode=mode)[0] for mode in ("ar", "sd"))
        assert one.token_ids == other.token_ids
    assert ngrams._chooser._observations.guess.judged > 0


def test_a_seed_that_comes_again_has_other_noise_where_k_is_chosen_in_all_engines(ngrams):
    assert ngrams._chooser._final is None
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True)
    modes = ("ar", "sd", "sd", "ar")
    texts = [ngrams.generate("xyxyxyxyxyxy", params, mode=mode)[0].token_ids for mode in modes]
    assert texts[0] == texts[3]
    assert len(set(map(tuple, texts))) == 3
    assert ngrams._chooser._final is not None
