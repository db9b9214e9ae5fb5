"""A prompt's log-probabilities come with its chunks, each token's once, from its own position."""

from __future__ import annotations

import itertools

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.requests.token_logprobs import PromptLogprobs
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.engine.slots.seats import Seats
from ssd_jax.errors import DeviceError
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters, pair_score
from tests.engine.letters import drain, outputs, request, spell
from tests.fakes.paged import LONG, Paged
from tests.sampling.edits import Edit, edited

CHUNK = 4


def made(*, slots=2, count=None, speculates=False, grows=False, grain=4):
    target = Paged if count else FakeTarget
    target = target(spell(LONG), slots=slots, max_chunk=CHUNK)
    stock = None
    if count:
        stock = PageStock(
            slots=slots, count=count, size=4, beyond=4, context=64, grain=grain, grows=grows
        )
    drafter = FakeDrafter(spell(LONG), slots=slots) if speculates else None
    engine = Engine(target, Letters, frozenset({1}), clock=Clock(), drafter=drafter, pages=stock)
    return engine, target


def prompt(size, first=70):
    return [first + at for at in range(size)]


def asked(ids, index=0, **settings):
    return request(ids, index, **{"max_tokens": 3, "prompt_logprobs": 0} | settings)


def scores(output):
    first, *others = output.prompt_logprobs
    assert first is None
    return [(other.token_id, other.logprob) for other in others]


def expected(ids):
    return [(token, pair_score(before, token)) for before, token in itertools.pairwise(ids)]


SIZES = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 11]


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_each_prompt_token_is_judged_by_the_position_before_it(size, speculates):
    engine, _ = made(speculates=speculates)
    engine.add(asked(prompt(size)))
    (output,) = outputs(drain(engine)).values()
    assert scores(output) == expected(prompt(size))


OFF_BY_ONE = [
    Edit(PromptLogprobs, "ask", "begin + 1 : end + 1", "begin : end"),
    Edit(PromptLogprobs, "entries", "self._prompt[len(entries)]", "self._prompt[len(entries) - 1]"),
]


@pytest.mark.parametrize("edit", OFF_BY_ONE, ids=["asked", "reported"])
def test_a_token_judged_by_its_own_position_is_noticed(edit):
    with edited([edit]):
        engine, _ = made()
        engine.add(asked(prompt(7)))
        try:
            (output,) = outputs(drain(engine)).values()
        except IndexError:
            return
        assert scores(output) != expected(prompt(7))


def test_short_prompts_of_one_step_each_get_their_own_scores():
    engine, target = made(slots=4)
    for index in range(4):
        engine.add(asked(prompt(1 + index % 2, 80 + 5 * index), index))
    engine.step()
    assert target.calls.count("prefill") > 1
    found = outputs(drain(engine))
    for index, output in found.items():
        assert scores(output) == expected(prompt(1 + index % 2, 80 + 5 * index))


def test_a_request_that_does_not_ask_is_not_scored():
    engine, target = made()
    engine.add(request(prompt(9), max_tokens=3))
    (output,) = outputs(drain(engine)).values()
    assert output.prompt_logprobs is None
    assert "score" not in target.calls


def test_a_scored_prompt_reuses_no_pages_and_its_own_are_reused():
    """Positions that are not run have no logits."""
    engine, target = made(count=40)
    for index, wanted in enumerate([None, 0, 0, None]):
        engine.add(asked(prompt(14), index, prompt_logprobs=wanted))
        (output,) = outputs(drain(engine)).values()
        assert output.text == LONG[:3]
        if wanted is not None:
            assert scores(output) == expected(prompt(14))
    assert [opening.reused for opening in target.opened] == [0, 0, 0, 12]
    engine, target = made(count=40)
    for index, wanted in enumerate([0, None]):
        engine.add(asked(prompt(14), index, prompt_logprobs=wanted))
        drain(engine)
    assert [opening.reused for opening in target.opened] == [0, 12]


def test_a_prompt_that_is_run_again_is_scored_once():
    engine, target = made(count=14, speculates=True, grows=True, slots=3, grain=0)
    for index in range(3):
        engine.add(asked(prompt(6, 70 + 7 * index), index, max_tokens=30))
    found = outputs(drain(engine))
    assert sum(output.metrics["preemptions"] for output in found.values()) >= 1
    assert target.calls.count("score") == 3 * 2
    for index, output in found.items():
        assert output.text == LONG[:30]
        assert scores(output) == expected(prompt(6, 70 + 7 * index))


@pytest.mark.parametrize("grain", [0, 4])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_prompt_that_is_put_off_amid_its_chunks_goes_on_with_the_next(monkeypatch, at, grain):
    engine, target = made(count=30, grows=True, grain=grain)
    engine.add(asked(prompt(14)))
    for _ in range(at):
        engine.step()
    (state,) = engine._seats.running.values()
    if grain:  # the pages that it leaves are known
        engine._seats.share()
    Seats._put_off(engine._seats, state)
    (output,) = outputs(drain(engine)).values()
    assert scores(output) == expected(prompt(14))
    assert target.calls.count("score") == 4
    assert [opening.reused for opening in target.opened] == [0, 0]


def test_a_request_that_ends_before_its_prompt_is_read_has_no_scores():
    engine, _ = made()
    request_id = engine.add(asked(prompt(14)))
    engine.step()
    engine.cancel(request_id)
    (output,) = outputs(drain(engine)).values()
    assert output.prompt_logprobs == []


def test_a_program_that_cannot_score_ends_its_request_alone(monkeypatch):
    engine, target = made()
    monkeypatch.setattr(target, "score", lambda *_: 1 / 0)
    engine.add(asked(prompt(9)))
    engine.add(request(prompt(9), 1, max_tokens=3))
    found = outputs(drain(engine))
    assert [found[index].finish_reason for index in (0, 1)] == ["error", "length"]


def test_a_device_that_fails_while_scores_are_read_breaks_the_engine(monkeypatch):
    class Lost:
        def read(self):
            raise DeviceError("gone")

    engine, target = made()
    monkeypatch.setattr(target, "score", lambda *_: Lost())
    engine.add(asked(prompt(9)))
    (output,) = outputs(drain(engine)).values()
    assert output.finish_reason == "error"
    assert output.prompt_logprobs == []
    assert engine.broken is not None
