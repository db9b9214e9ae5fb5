"""Requests whose prompts begin alike say what each says alone, whatever was left in pages."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest

from ssd_jax import InputError, SamplingParams
from ssd_jax.devices.programs.paged import PagedPrograms, Paging
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.loading.loaded import Loaded
from tests.engine.slots.flawed_stocks import Early, Uncounted
from tests.llm.paged import ALONE, ELSEWHERE, LONG, PAGE, elsewhere, opened, with_new_engines
from tests.llm.runs import ids, outputs

COUPLED = [
    {},
    {"repetition_penalty": 1.4, "max_tokens": 30},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"frequency_penalty": 0.5, "max_tokens": 9, "logit_bias": {65: 2.0}},
    {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 90},
]
OTHER = "A page of something else. " * 11
FEW = str(7 * PAGE // 2)
"""Seven pages of the target alone; `test_paged.py` compiles programs for as many."""


def asked(llm, params=COUPLED):
    """Prompts of three pages: the same ones, with other ends, and with other beginnings."""
    ends = ["", "Say it again", "", " and so on", "?", "Say it again"]
    prompts = [LONG + end for end in ends] + [OTHER, OTHER[:140] + LONG[:120]]
    return [
        llm.request(prompt, SamplingParams(ignore_eos=True, **{"max_tokens": 24, **changes}), index)
        for index, (prompt, changes) in enumerate(zip(prompts, [*params, {}, {}], strict=True))
    ]


def cached(found):
    return [output.metrics["cached_tokens"] for output in found]


@pytest.fixture(scope="module")
def expected(pair):
    llm = opened(pair, **ALONE)
    found = outputs(llm, asked(llm), "ar")
    assert cached(found) == [None] * len(found)
    return ids(found)


@pytest.fixture(scope="module")
def few(pair):
    return opened(pair, kv_memory=FEW, **ALONE)


@pytest.fixture(scope="module")
def shared(pair):
    """Seven pages: what is known is forgotten, too."""
    return opened(pair, kv_memory=str(7 * PAGE))


@pytest.mark.more
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_prefix_caching_leaves_the_text_of_every_mode_as_it_is(shared, expected, mode):
    """Twice: nothing is known at first."""
    before = outputs(shared, asked(shared), mode)
    after = outputs(shared, asked(shared), mode)
    assert ids(before) == ids(after) == expected
    assert cached(before)[:2] == [0, 256]
    assert sum(cached(before)) > 4 * 256


@pytest.mark.more
@pytest.mark.parametrize("where", elsewhere("submesh"))
def test_a_draft_elsewhere_reuses_the_same_pages(pair, expected, where):
    with opened(pair, kv_memory=str(9 * PAGE), **ELSEWHERE[where]) as llm:
        for _ in range(2):
            found = outputs(llm, asked(llm), "ssd")
            assert ids(found) == expected
        assert sum(cached(found)) >= 2 * 256
        if where == "process":
            os.kill(llm.loaded.worker.supervisor.pid, signal.SIGKILL)
            found = outputs(llm, asked(llm), "ssd")
            assert ids(found) == expected, "while there is no draft, or a new one"
            assert any("dead" in (output.metrics["miss_causes"] or ()) for output in found)
            end = time.monotonic() + 120
            while not any(output.metrics["hit_rate"] for output in found):
                assert time.monotonic() < end, "no hits by a worker with new pages"
                found = outputs(llm, asked(llm), "ssd")
                assert ids(found) == expected
            assert sum(cached(found)) >= 2 * 256


@pytest.mark.slow
def test_the_ratio_rule_draws_the_same_and_logprobs_are_the_same_bits(pair):
    """With the same noise and the same laws, as a page has the same bits whoever has filled it."""
    settings = {"verify": "ratio", "exact": "bitwise"}
    params = [{**changes, "logprobs": 2} for changes in COUPLED]
    found = {}
    for sharing in (False, True):
        llm = opened(pair, page_size=128, prefix_caching=sharing, **settings)
        outputs(llm, asked(llm, params), "ssd")
        for mode in ("ar", "ssd"):
            llm_outputs = outputs(llm, asked(llm, params), mode)
            assert any(cached(llm_outputs)) == sharing
            found[sharing, mode] = [(output.token_ids, output.logprobs) for output in llm_outputs]
    for mode in ("ar", "ssd"):
        assert found[True, mode] == found[False, mode], mode
    greedy = [0, 1, 4, 6, 7]
    assert [found[True, "ar"][i] for i in greedy] == [found[True, "ssd"][i] for i in greedy]


def assert_cut_off_prompts_leave_their_pages(llm, mode, expected):
    engine = llm.engine_of(mode)
    requests = asked(llm)
    for steps in (0, 1, 4, 5, 9):
        cut = [engine.add(request) for request in requests[6:]]
        for _ in range(steps):
            engine.step()
        for output in cut:
            engine.cancel(output)
        while engine.has_work:
            engine.step()
    assert ids(outputs(llm, asked(llm), mode)) == expected


def test_a_prompt_that_is_cut_off_leaves_what_was_run_of_it(few, expected):
    assert_cut_off_prompts_leave_their_pages(few, "ar", expected)


@pytest.mark.more
def test_a_prompt_that_is_cut_off_leaves_what_the_draft_has_run_of_it(shared, expected):
    assert_cut_off_prompts_leave_their_pages(shared, "ssd", expected)


@pytest.mark.more
def test_prefix_caching_can_be_turned_off_and_needs_pages(pair):
    llm = opened(pair, page_size=128, enable_prefix_caching=False, **ALONE)
    for _ in range(2):
        assert not any(cached(outputs(llm, asked(llm), "ar")))
    with pytest.raises(InputError, match="prefix_caching needs pages that slots share; give kv_m"):
        opened(pair, prefix_caching=True)


class Alike(PageStock):
    """Takes all prompts for the same."""

    def names(self, prompt, kind=b""):
        return tuple(bytes([page]) for page in range((len(prompt) - 1) // 128))


def forgetful(self, name):
    """Has no history of tokens that are not run."""
    return usual_program(self, name) if name[0] != "remember" else lambda history, *_: (history,)


usual_program = PagedPrograms.__getitem__


def test_planted_faults_of_prefix_caching_are_caught(few, expected, monkeypatch):
    def found():
        """After a prompt of which little was run."""
        llm = with_new_engines(few)
        cut = llm.engine.add(asked(llm)[0])
        llm.engine.step()
        llm.engine.cancel(cut)
        return [ids(outputs(llm, asked(llm), "ar")) for _ in range(2)]

    assert found() == [expected, expected]
    for flaw in (Early, Alike, Uncounted):
        with monkeypatch.context() as patch:
            patch.setattr("ssd_jax.loading.loaded.PageStock", flaw)
            assert found() != [expected, expected], flaw
    monkeypatch.setattr(PagedPrograms, "__getitem__", forgetful)
    assert found() != [expected, expected]


@pytest.mark.parametrize(("exact", "pages"), [("bitwise", 4), ("widest", 4), ("distribution", 5)])
def test_bitwise_mode_shares_pages_in_whole_chunks(exact, pages):
    """Behind them a prompt is then cut into the same chunks, whatever was reused."""
    execution = SimpleNamespace(prefill_chunks=(64, 512))
    programs = SimpleNamespace(
        slots=4,
        context=1024,
        paging=Paging(size=128, total=40),
        verification=SimpleNamespace(widths=(0, 3)),
        model=SimpleNamespace(data_shards=1, execution=execution),
    )
    config = SimpleNamespace(prefix_caching=None)
    loaded = SimpleNamespace(
        programs=programs,
        config=config,
        exact=exact,
        grows=exact == "distribution",
        resolved=SimpleNamespace(window=None),
    )
    assert len(Loaded.new_stock(loaded).names(range(700))) == pages
