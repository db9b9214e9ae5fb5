"""Whole runs of the engine follow the law of the model, whatever drafts; see `law`."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.config import derived
from ssd_jax.sampling.proposal import as_point_mass_where
from tests.fakes.instrument import changing_proposals
from tests.fakes.tuners import Restless
from tests.llm import law
from tests.llm.law import FEW_BRANCHES, LETTERS, MANY, assert_lawful, engine_with, open_llm
from tests.models.every_mechanism import in_windows
from tests.sampling.evidence import ALPHA
from tests.selection import cases


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return law.write_checkpoints(tmp_path_factory.mktemp("law"))


@pytest.fixture(scope="module")
def laws(checkpoints):
    return law.laws_of(checkpoints[0])


def test_the_laws_are_laws_that_counts_can_tell_apart(laws):
    for texts in laws.values():
        assert sum(texts.values()) == pytest.approx(1)
        assert {token for text in texts for token in text} == set(LETTERS)
        assert max(texts.values()) < 0.6


@pytest.fixture(scope="module")
def branching(checkpoints):
    return open_llm(checkpoints, "ssd", **FEW_BRANCHES)


def assert_sd_lawful(llm, laws, drafter="model", **more):
    metrics = assert_lawful(llm, laws, llm.engine, branches=False, **more)
    histograms = [figures["acceptance_histogram"] for figures in metrics]
    rounds = np.sum([np.pad(shape, (0, 4))[:4] for shape in histograms if shape], axis=0)
    assert (rounds[1:3] > 0).all() if drafter == "model" else rounds[1] > 0


def assert_ssd_lawful(llm, laws, **more):
    metrics = assert_lawful(llm, laws, llm.engine, **more)
    assert 0.1 < np.mean([metric["hit_rate"] for metric in metrics]) < 0.95


def assert_caught(llm, laws, mode):
    engine = engine_with(llm, mode, changing_proposals(law.mix_up))
    outputs, _ = law.run(engine, law.requests(llm))
    assert min(law.p_values(laws, outputs).values()) <= ALPHA


def test_texts_follow_the_law_and_greedy_rows_are_plain_decoding(laws, branching):
    assert_sd_lawful(branching, laws)


@pytest.mark.parametrize("mode", cases(["sd", "ssd"], "sd"))
def test_a_draft_that_ships_another_q_is_caught(laws, branching, mode):
    assert_caught(branching, laws, mode)


@pytest.mark.slow
def test_texts_follow_the_law_while_k_and_budget_change_every_round(checkpoints, laws, monkeypatch):
    """With programs of two budgets, and Saguaro sampling, whose sets depend on them."""
    monkeypatch.setattr(derived, "AUTO_BUDGETS", (2, 4))
    settings = FEW_BRANCHES | {"budget": "auto", "saguaro_c": 0.5}
    llm = open_llm(checkpoints, "ssd", **settings)
    tuner = Restless((1, 2), (2, 3, 4), seed=5)
    llm._loaded = dataclasses.replace(llm.loaded, tuner=lambda *_: tuner)
    assert_ssd_lawful(llm, laws)
    assert len({(plan.k, plan.budget) for plan in tuner.plans}) == 6


@pytest.mark.more
def test_texts_of_sampled_trees_follow_the_law_beside_greedy_ones(checkpoints, laws):
    llm = open_llm(checkpoints, "sd", tree_nodes=7)
    assert_sd_lawful(llm, laws)


TREES = {"tree_nodes": 5, "budget": "3"}


@pytest.mark.more
def test_texts_of_sampled_trees_under_ssd_follow_the_law_beside_greedy_ones(checkpoints, laws):
    assert_ssd_lawful(open_llm(checkpoints, "ssd", **TREES), laws)


@pytest.mark.more
@pytest.mark.parametrize("settings", [FEW_BRANCHES, TREES], ids=["chains", "trees"])
def test_texts_of_a_model_with_every_mechanism_follow_the_law(tmp_path, settings):
    """They pass its windows before they begin."""
    checkpoints = law.write_checkpoints(tmp_path, "granite", **in_windows(4))
    laws, llm = law.laws_of(checkpoints[0]), open_llm(checkpoints, "ssd", **settings)
    assert_ssd_lawful(llm, laws)


SD = {
    "trees of a greedy draft": {"tree_nodes": 7, "draft_temperature": 0.0},
    "trees by traversal": {"tree_nodes": 7, "verify": "block"},
    "trees of a q of two": {"tree_nodes": 9, "proposal_support": "2"},
    "whole draft": {"proposal_support": "full"},
    "ngram": {"drafter": "ngram"},
    "block verification": {"verify": "block"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SD)
def test_more_texts_of_sd_follow_the_law(checkpoints, laws, case):
    llm = open_llm(checkpoints, "sd", **SD[case])
    assert_sd_lawful(llm, laws, SD[case].get("drafter", "model"), count=MANY)


SSD = {
    "few branches by confidence": FEW_BRANCHES,
    "block verification": FEW_BRANCHES | {"verify": "block"},
    "trees by traversal": TREES | {"verify": "block"},
    "trees, n-grams after a miss": TREES | {"backup": "ngram"},
    "trees of a q of two, outcomes by q": TREES | {"proposal_support": "2", "predict": "plain"},
    "trees of a greedy draft": TREES | {"draft_temperature": 0.0},
    "C = 0, n-grams after a miss": {
        "budget": "4",
        "saguaro_c": 0.0,
        "proposal_support": "full",
        "backup": "ngram",
        "fan_out": "measured",
        "predict": "plain",
    },
    "C = 0.5, random tokens after a miss": {
        "budget": "4",
        "saguaro_c": 0.5,
        "proposal_support": "full",
        "fan_out": "1,0,3/2,1,1",
        "backup": "random",
        "predict": "plain",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SSD)
def test_more_texts_of_ssd_follow_the_law_on_hits_and_misses(checkpoints, laws, case):
    assert_ssd_lawful(open_llm(checkpoints, "ssd", **SSD[case]), laws, count=MANY)


@pytest.mark.slow
def test_a_fifth_of_the_q_may_get_lost(laws, branching):
    """Such rows are verified as point masses; which ones depends on nothing that was drawn."""
    lost = np.random.default_rng(3)

    def lose(proposal):
        rows = jnp.asarray(lost.random(len(proposal.length)) < 0.2)
        return as_point_mass_where(proposal, rows)

    engine = engine_with(branching, "ssd", changing_proposals(lose))
    assert_lawful(branching, laws, engine, count=MANY)
