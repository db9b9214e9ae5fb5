"""Figures of sets and their mean, from given judgements and costs."""

import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console

from ssd_jax.tools.bench.report import json_safe
from ssd_jax.tools.distill.evaluate import figures
from ssd_jax.tools.distill.evaluation_table import evaluation_tables
from ssd_jax.tools.distill.prompt_ids import PromptIds
from ssd_jax.tools.distill.scoring import DraftFigures
from ssd_jax.tools.distill.settings import EvaluateSettings
from ssd_jax.tools.distill.step_costs import StepCosts

SETTINGS = EvaluateSettings(ks=(1, 2, 3), budgets=(4, 8))
STEPS = StepCosts(
    target_ms=1.0, target={1: 1.0, 2: 1.0, 3: 1.1, 4: 1.2}, draft={1: 0.1, 4: 0.2, 8: 0.9}
)
PROMPTS = [PromptIds(set=name, index=0, ids=[1]) for name in ("right", "wrong")]


def judged(*, rank: int, size: int = 61) -> DraftFigures:
    """Always or never right; `rank` is of every token."""
    right = np.full(size, float(rank == 0))
    return DraftFigures(np.full(size, rank), right, 0.5 + right / 2)


@pytest.fixture(scope="module")
def found():
    both = [judged(rank=0), judged(rank=1)]
    return figures(PROMPTS, {"greedy": both, "sampled": both}, SETTINGS, STEPS)


def test_a_draft_that_is_always_right_commits_all(found):
    right = found["sets"]["right"]
    assert (right["greedy_agreement"], right["overlap"]) == (1, 1)
    assert right["tokens"] == {"greedy": 61, "sampled": 61}
    for of in ("greedy", "sampled"):
        assert right["tokens_per_call"][of] == {1: 2, 2: 3, 3: 4}
        assert right["tokens_per_call"][f"{of}_all_hits"] == {1: 2, 2: 2, 3: 3}  # the tail rule
    predicted = right["predicted"]["greedy"]
    assert predicted["sd"]["k"] == 3
    assert predicted["sd"]["speed_up"] == pytest.approx(4 / (1.2 + 3 * 0.1))
    # Branches of k = L are all that is ever used; they are sure to hit, with K - 1 tokens.
    assert predicted["ssd"]["budget"] == 4  # twice as many would take longer than the target
    assert predicted["ssd"]["hit_rate"] == pytest.approx(1)
    assert predicted["ssd"]["speed_up"] == pytest.approx(3 / 1.1)


def test_a_draft_that_is_never_right_commits_one(found):
    wrong = found["sets"]["wrong"]
    assert (wrong["greedy_agreement"], wrong["overlap"]) == (0, 0.5)
    for by_k in wrong["tokens_per_call"].values():
        assert by_k == {1: 1, 2: 1, 3: 1}
    assert wrong["predicted"]["greedy"]["sd"] == {"k": 1, "speed_up": pytest.approx(1 / 1.1)}


def test_the_mean_is_over_sets(found):
    mean = found["mean"]
    assert (mean["greedy_agreement"], mean["overlap"]) == (0.5, 0.75)
    assert mean["tokens_per_call"]["greedy"] == {1: 1.5, 2: 2, 3: 2.5}
    sd = mean["predicted"]["greedy"]["sd"]  # by rates of a half at every place
    assert sd == {"k": 1, "speed_up": pytest.approx(1.5 / 1.1)}


def test_a_set_apart_has_no_part_in_the_mean(found):
    both = [judged(rank=0), judged(rank=1)]
    settings = dataclasses.replace(SETTINGS, apart=("wrong",))
    other = figures(PROMPTS, {"greedy": both, "sampled": both}, settings, STEPS)
    assert other["sets"] == found["sets"]
    for name in ("greedy_agreement", "overlap", "tokens_per_call", "predicted"):
        assert other["mean"][name] == other["sets"]["right"][name]


def test_prompts_of_a_kind_have_figures_of_their_own(found):
    assert found["sets"]["right"]["kinds"] == {}
    prompts = [PromptIds(set="a", index=i, ids=[1], kind=kind) for i, kind in enumerate("xyx")]
    judgements = [judged(rank=0), judged(rank=1), judged(rank=1)]
    kinds = figures(prompts, {"greedy": judgements, "sampled": judgements}, SETTINGS, STEPS)[
        "sets"
    ]["a"]["kinds"]
    assert [(kind, one["prompts"]) for kind, one in kinds.items()] == [("x", 2), ("y", 1)]
    assert [one["greedy_agreement"] for one in kinds.values()] == [0.5, 0.0]
    assert kinds["y"]["tokens_per_call"]["greedy"] == {1: 1, 2: 1, 3: 1}


def test_texts_of_one_token_take_no_call():
    one = [judged(rank=0, size=1), judged(rank=0)]
    sets = figures(PROMPTS, {"greedy": one, "sampled": one}, SETTINGS, STEPS)
    assert np.isnan(list(sets["sets"]["right"]["tokens_per_call"]["greedy"].values())).all()
    assert sets["mean"]["tokens_per_call"] == sets["sets"]["wrong"]["tokens_per_call"]
    document = {"draft": "d", "steps": dataclasses.asdict(STEPS), "made_of": {"apart": []}, **sets}
    shown = json_safe(document | {"steps": {**document["steps"], "draft": {"1": 0.1}}})
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(evaluation_tables(shown)[1])
    assert re.search(r"right +greedy +SD +- +- +-", console.export_text())
