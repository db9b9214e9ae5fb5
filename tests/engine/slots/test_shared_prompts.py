"""The engine shares what both roles were asked to fill, and runs only what is left of a prompt."""

from __future__ import annotations

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters
from tests.engine.letters import drain, ids, outputs, request, spell
from tests.fakes.instrument import instrument

SIZE = 8
PROMPT = tuple(range(40, 60))  # two pages and a half


def made(*, count=32, speculates=True, slots=2, groups=1, says="fine"):
    target = FakeTarget(spell(says), slots=slots)
    drafter = FakeDrafter(spell(says), slots=slots)
    stock = PageStock(
        slots=slots, count=count, size=SIZE, beyond=4, context=64, groups=groups, grain=SIZE
    )
    engine = Engine(target, Letters, frozenset({1}), clock=Clock(), pages=stock,
                    drafter=drafter if speculates else None)  # fmt: skip
    return engine, target, drafter


def reused(target):
    return [opening.reused for opening in target.opened]


@pytest.mark.parametrize("speculates", [False, True])
def test_requests_that_come_together_run_their_common_beginning_once(speculates):
    engine, target, _ = made(speculates=speculates)
    for index in range(4):
        engine.add(request((*PROMPT, 60 + index), index, max_tokens=9))
    found = outputs(drain(engine))
    assert {output.text for output in found.values()} == {"fine"}
    assert [output.metrics["cached_tokens"] for output in found.values()] == [0, 16, 16, 16]
    assert reused(target) == [0, 16, 16, 16]
    assert target.calls.count("prefill") == 6 + 3 * 2
    shared = {opening.pages[:2] for opening in target.opened}
    assert len(shared) == 1


def test_a_prompt_that_is_cut_off_leaves_the_pages_that_are_full():
    engine, target, _ = made()
    cut = engine.add(request(PROMPT))
    for _ in range(3):  # chunks of four
        engine.step()
    engine.cancel(cut)
    engine.add(request(PROMPT))
    drain(engine)
    assert reused(target) == [0, 8]


def test_pages_that_the_drafter_was_not_given_are_not_shared():
    engine, target, drafter = made()
    failing = [True]

    def fail(_slot, _tokens, offset, *, last):
        if failing and offset >= 8:
            raise RuntimeError("no more")

    instrument(drafter, fail={"prefill": fail})
    engine.add(request(PROMPT))
    for _ in range(2):
        engine.step()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            engine.step()
    engine.cancel(0)
    failing.clear()
    engine.add(request(PROMPT, 1))
    found = outputs(drain(engine))[1]
    assert found.token_ids == [*ids("fine"), 1]
    assert reused(target) == [0, 8]


def test_a_request_that_waits_for_pages_enters_when_they_come_back():
    engine, target, _ = made(count=8)
    for index in range(3):
        engine.add(request(PROMPT, index, max_tokens=20))
    found = outputs(drain(engine))
    assert {output.text for output in found.values()} == {"fine"}
    assert reused(target) == [0, 16, 16]


def test_a_request_enters_where_its_prompt_is_known():
    """Two that take the first group's slots, until a third has filled pages of the second."""
    engine, target, _ = made(slots=4, groups=2, says="a long text of many rounds" * 2)
    others = [engine.add(request([70 + index], index, max_tokens=50)) for index in range(2)]
    engine.add(request(PROMPT, 2, max_tokens=4))
    while len(target.opened) < 3 or target.calls.count("prefill") < 2 + 5:
        engine.step()
    for other in others:
        engine.cancel(other)
    drain(engine)
    engine.add(request(PROMPT, 3, max_tokens=4))
    drain(engine)
    assert [opening.slot for opening in target.opened] == [0, 1, 2, 2]
    assert reused(target) == [0, 0, 0, 16]
