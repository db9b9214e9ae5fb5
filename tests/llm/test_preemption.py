"""Requests that are put off for want of pages say what they say with room of their own."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.programs.paged import PagedPrograms
from tests.llm.paged import ALONE, ELSEWHERE, PAGE, elsewhere, opened, with_new_engines
from tests.llm.preempted import ALONE_FEW, FEW, asked, asked_under_a_grammar, put_off
from tests.llm.runs import ids, outputs


@pytest.fixture(scope="module")
def expected(pair):
    llm = opened(pair, **ALONE, context=400)
    found = outputs(llm, asked(llm), "ar")
    assert {output.metrics["preemptions"] for output in found} == {None}
    assert found[-1].token_ids.count(0) > 5
    return ids(found)


@pytest.mark.more
@pytest.mark.parametrize("prefix_caching", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_preempted_request_has_its_own_text_in_every_mode(pair, expected, prefix_caching):
    llm = opened(pair, prefix_caching=prefix_caching, **FEW)
    for mode in llm.modes:
        found = outputs(llm, asked(llm), mode)
        assert ids(found) == expected, mode
        assert put_off(found) >= 2, mode


@pytest.mark.more
def test_a_preempted_request_under_a_grammar_has_its_own_text_in_every_mode(pair):
    roomy = opened(pair, **ALONE, context=400)
    expected = ids(outputs(roomy, asked_under_a_grammar(roomy), "ar"))
    assert all({*tokens} <= {*range(40, 60)} for tokens in expected[::2])
    llm = opened(pair, **FEW)
    for mode in llm.modes:
        found = outputs(llm, asked_under_a_grammar(llm), mode)
        assert ids(found) == expected, mode
        assert put_off(found) >= 1, mode


@pytest.mark.more
@pytest.mark.parametrize("where", elsewhere("process"))
def test_a_draft_elsewhere_follows_a_preempted_request(pair, expected, where):
    settings = FEW | {"kv_memory": str((14 if where == "groups" else 9) * PAGE // 2)}
    with opened(pair, **settings | ELSEWHERE[where]) as llm:
        found = outputs(llm, asked(llm), "ssd")
        assert ids(found) == expected
        assert put_off(found) >= 2
        assert max(output.metrics["hit_rate"] for output in found) > 0
        if where == "process":
            engine = llm.engine_of("ssd")
            for request in asked(llm):
                engine.add(request)
            events = []
            while not any(state.times.preemptions for state in engine._seats.waiting):
                events += engine.step()
            os.kill(llm.loaded.worker.supervisor.pid, signal.SIGKILL)
            while engine.has_work:
                events += engine.step()
            ended = [event.output for event in events if event.output is not None]
            assert ids(sorted(ended, key=lambda output: output.prompt_index)) == expected


@pytest.mark.slow
def test_the_ratio_rule_draws_the_same_where_lengths_do_not_change(pair):
    """A proposal that was dropped is drawn again, from the same noise."""
    more = {"verify": "ratio", "context": 400}
    roomy, tight = opened(pair, **more), opened(pair, **more | FEW)
    for mode in ("ar", "sd"):
        found = outputs(tight, asked(tight), mode)
        assert put_off(found) >= 2
        assert ids(found) == ids(outputs(roomy, asked(roomy), mode)), mode
    assert tight.loaded.roles("ssd", 3).drafter.timed
    assert not roomy.loaded.roles("ssd", 3).drafter.timed


@pytest.mark.more
def test_in_bitwise_mode_no_request_is_put_off(pair):
    llm = opened(pair, exact="bitwise", **ALONE, **ALONE_FEW)
    bits = opened(pair, exact="bitwise", **ALONE, context=400)
    found = outputs(llm, asked(llm), "ar")
    assert put_off(found) == 0
    assert ids(found) == ids(outputs(bits, asked(bits), "ar"))


usual_program = PagedPrograms.__getitem__


def without_output(self, name):
    """Does not count what a text had said."""
    return usual_program(self, name) if name[0] != "recall" else lambda history, *_: (history,)


def with_padding(self, name):
    """Counts a chunk's padding as output."""
    program = usual_program(self, name)
    if name[0] != "recall":
        return program
    return lambda history, tokens, where: program(
        history, tokens, np.array([*where[:2], tokens.shape[1]], np.int32)
    )


def test_planted_faults_of_preemption_are_caught(pair, expected, monkeypatch):
    few = opened(pair, **ALONE, **ALONE_FEW)

    def found():
        llm = with_new_engines(few)
        return ids(outputs(llm, asked(llm), "ar"))

    assert found() == expected
    for fault in (without_output, with_padding):
        with monkeypatch.context() as patch:
            patch.setattr(PagedPrograms, "__getitem__", fault)
            assert found() != expected, fault
    with monkeypatch.context() as patch:
        patch.setattr(PagedRole, "set_pages", lambda self, slot, pages: None)
        assert found() != expected
