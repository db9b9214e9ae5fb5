"""Where every layer has a window, pages that no query sees any more go to other texts."""

from __future__ import annotations

import numpy as np
import pytest

from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair
from tests.llm.paged import ALONE, ELSEWHERE, LONG, opened, with_new_engines
from tests.llm.preempted import PARAMS, asked, put_off
from tests.llm.runs import ids, outputs
from tests.models.every_mechanism import in_windows
from tests.models.golden import ON_GPUS, ON_TPUS

pytestmark = pytest.mark.usefixtures("steady_streams")
MORE = pytest.mark.more

WINDOW, CONTEXT, LENGTH = 24, 400, 300
SIZE, COUNT = 64, 9
"""Positions of a page, and pages; three texts without windows would need 18."""


def of(count, size=SIZE, models=2):
    """Memory of so many pages: three layers, two heads, K beside V of 8, float32."""
    return {"kv_memory": str(count * models * 3 * 2 * size * 2 * 8 * 4), "page_size": size}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("windows"), "granite", **in_windows(WINDOW))


def texts(llm, mode):
    return outputs(llm, asked(llm, max_tokens=LENGTH), mode)


@pytest.fixture(scope="module")
def expected(pair):
    llm = opened(pair, **ALONE, context=CONTEXT)
    found = texts(llm, "ar")
    assert {output.metrics["kv_pages"] for output in found} == {None}
    return ids(found)


TREES = {"tree_nodes": 8}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="chains"),
        *(
            pytest.param(settings, id=name, marks=MORE)
            for name, settings in {
                "trees": TREES,
                "pages of 16": {**of(32, 16), "attention": "xla"},
                "as on a TPU": {**of(32, 16), "there": ON_TPUS},
                "as on a GPU, trees": {**of(32, 16), "there": ON_GPUS, **TREES},
                "process": ELSEWHERE["process"],
                "process, trees": {**ELSEWHERE["process"], **TREES},
                "groups": {**of(2 * COUNT), **ELSEWHERE["groups"]},
            }.items()
        ),
    ],
)
def test_texts_take_pages_that_others_no_longer_see(pair, expected, settings):
    """None is put off, though all together grow to twice as many pages as there are."""
    with opened(pair, context=CONTEXT, **of(COUNT) | settings) as llm:
        assert llm.resolved.window == WINDOW
        count = llm.loaded.programs.paging.total // llm.target.model.data_shards
        for mode in llm.modes:
            found = texts(llm, mode)
            assert ids(found) == expected, mode
            pages = [output.metrics["kv_pages"] for output in found]
            assert sum(sorted(pages)[-3:]) > 1.5 * count
            assert put_off(found) == 0, mode


@pytest.mark.more
@pytest.mark.parametrize("where", [{}, ELSEWHERE["process"]], ids=["inline", "process"])
def test_a_draft_that_is_the_target_sees_what_the_target_sees(pair, expected, where):
    """Its own pages hold the text, too: all that it proposes is accepted."""
    with opened([pair[0], pair[0]], context=CONTEXT, **of(COUNT) | where) as llm:
        if llm.loaded.worker is not None:
            llm.loaded.worker.patience = 120.0  # no answer is late, however busy the machine is
        for mode in ("sd", "ssd"):
            found = texts(llm, mode)
            assert ids(found) == expected
            rates = [
                output.metrics["acceptance_by_position"]
                for output, params in zip(found, PARAMS, strict=True)
                if "temperature" not in params  # the others draw from more ids than a q has
            ]
            accepted, judged = np.concatenate(rates).sum(axis=0)
            assert accepted > 0.95 * judged, mode


@pytest.mark.more
def test_pages_of_prompts_that_are_alike_are_kept_and_reused(pair):
    """Prompts of four pages, of which a text sees the last one alone."""

    def prompts(llm):
        params = [{"temperature": 0.8, "seed": 1}, {}, {"frequency_penalty": 0.5}] * 2
        return [
            llm.request(
                LONG + end, SamplingParams(ignore_eos=True, max_tokens=90, **changes), index
            )
            for index, (end, changes) in enumerate(
                zip(
                    ["", "Say it again", "", " and so on", "?", "Say it again"], params, strict=True
                )
            )
        ]

    roomy = opened(pair, **ALONE, context=CONTEXT)
    expected = ids(outputs(roomy, prompts(roomy), "ar"))
    with opened(pair, context=CONTEXT, **of(12)) as llm:
        for mode in llm.modes:
            for _ in range(2):
                found = outputs(llm, prompts(llm), mode)
                assert ids(found) == expected, mode
            assert sum(output.metrics["cached_tokens"] for output in found) > 2 * SIZE


@pytest.mark.more
def test_a_draft_with_narrower_windows_leaves_the_target_its_pages(pair, expected, tmp_path):
    draft = tiny.write_checkpoint(tmp_path, "granite", noise=0.04, **in_windows(3))
    with opened([pair[0], str(draft)], context=CONTEXT, **of(COUNT)) as llm:
        assert llm.resolved.window == WINDOW
        for mode in llm.modes:
            assert ids(texts(llm, mode)) == expected, mode


class Eager(PageStock):
    """Takes back pages that the next queries see."""

    def release_hidden(self, slot, position):
        super().release_hidden(slot, position + 2 * SIZE)


class Moved(PageStock):
    """Has the pages that are left at the places of those that are gone."""

    def pages(self, slot):
        released = self._by_slot[slot].released
        return (*super().pages(slot)[released:], *super().pages(slot)[:released])


class Keeping(PageStock):
    """Takes nothing back."""

    def release_hidden(self, slot, position):
        pass


def test_planted_faults_of_pages_behind_windows_are_caught(pair, expected, monkeypatch):
    few = opened(pair, context=CONTEXT, **ALONE, **of(7, models=1))

    def found():
        return texts(with_new_engines(few), "ar")

    assert ids(found()) == expected
    for flaw in (Eager, Moved):
        with monkeypatch.context() as patch:
            patch.setattr("ssd_jax.loading.loaded.PageStock", flaw)
            assert ids(found()) != expected, flaw
    monkeypatch.setattr("ssd_jax.loading.loaded.PageStock", Keeping)
    assert put_off(found()) > 0
