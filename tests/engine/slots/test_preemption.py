"""Texts that grow into pages which run out: the youngest waits and goes on where it was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.requests.occurrences import derived
from ssd_jax.engine.requests.sequence import Sequence
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.engine.slots.seats import Seats
from ssd_jax.errors import DeviceError
from ssd_jax.roles.records import ProposedTokens
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import Clock, FakeDrafter, Letters
from tests.engine.letters import drain, ids, outputs, request, spell
from tests.fakes.grammars import Successors, mask_of
from tests.fakes.instrument import At, instrument
from tests.fakes.paged import CONTEXT, LONG, SIZE, K, Paged
from tests.sampling.edits import Edit, edited


def made(
    count, *, speculates=True, slots=3, groups=1, says=LONG, grain=0, timed=False, fail=None,
    window=None, kind=Paged,
):  # fmt: skip
    target = kind(spell(says), slots=slots, context=CONTEXT, window=window)
    stock = PageStock(slots=slots, count=count, size=SIZE, beyond=K + 1 if speculates else 1,
                      context=CONTEXT, groups=groups, grain=grain, grows=True,
                      window=window)  # fmt: skip
    drafter = FakeDrafter(spell(says), slots=slots, k=K, wrong=lambda at: at % 5 == 0)
    drafter.timed = timed
    instrument(drafter, fail=fail)
    engine = Engine(target, Letters, frozenset({1}), clock=Clock(), pages=stock,
                    drafter=drafter if speculates else None)  # fmt: skip
    return engine, target


def asked(engine, *sizes, prompt=6):
    return [
        engine.add(request([70 + n] * prompt, n, max_tokens=size)) for n, size in enumerate(sizes)
    ]


def preemptions(found):
    return [output.metrics["preemptions"] for _, output in sorted(found.items())]


def test_a_device_that_fails_when_a_request_with_a_stop_was_put_off_ends_both():
    """The tokens that a request got in that step may hold its stop string."""
    ends = set()
    for at in range(3, 24):
        engine, target = made(14, slots=2)

        def failing(*_, engine=engine):
            if any(state.times.preemptions for state in engine._seats.waiting):
                raise DeviceError("gone")

        instrument(target, fail={"forward": failing})
        engine.add(request([70] * 6, 0, max_tokens=40))
        engine.add(request([71] * 6, 1, max_tokens=40, stop=[LONG[at : at + 3]]))
        found = outputs(drain(engine))
        assert found[0].finish_reason == "error" or engine.broken is None
        ends.add((engine.broken is None, found[1].finish_reason))
    assert (False, "stop") in ends


@pytest.mark.parametrize("speculates", [False, True])
def test_the_youngest_request_waits_and_goes_on_where_it_was(speculates):
    engine, target = made(14, speculates=speculates)
    asked(engine, 40, 30, 30, 9)
    found = outputs(drain(engine))
    assert [found[n].text for n in range(4)] == [LONG[:n] for n in (40, 30, 30, 9)]
    times = preemptions(found)
    assert times[0] == 0
    assert sum(times) >= 2
    assert len(target.opened) == 4 + sum(times)
    again = [opening for opening in target.opened if opening.index == 2][1:]
    assert all(opening.prompt == opening.ban_before == 6 for opening in again)
    assert found[0].metrics["kv_pages"] in (12, 13)


VOCAB = 128
FOLLOWS: dict[int | None, set[int]] = {
    None: {ord("a"), ord("!")},
    **{token: {ord("!"), 97 + (token - 96) % 26} for token in range(97, 123)},
}
"""What may follow each letter of `LONG`: the one that does, and another."""


class Masked(Paged):
    """Checks the masks of every position: the grammar is where the text is."""

    masks = 0

    def prefill_last(self, slot, tokens, offset, masks=None):
        assert masks.tolist() == [[mask_of(FOLLOWS[None], VOCAB).tolist()]]
        return super().prefill_last(slot, tokens, offset)

    def forward(self, tokens, lengths, drafted=None):
        self._pending = {
            slot: int(token)
            for slot, (token, length) in enumerate(zip(tokens, lengths, strict=True))
            if length >= 0
        }
        return super().forward(tokens, lengths, drafted)

    def read_tokens(self, drafted):
        return ProposedTokens(drafted.tokens)

    def accept(self, logits, proposal=None, masks=None):
        assert masks is not None
        for slot, pending in self._pending.items():
            allowed = FOLLOWS[pending]
            for row, token in enumerate([*logits[1][slot], None]):
                if allowed is not None:
                    assert masks[slot, row].tolist() == mask_of(allowed, VOCAB).tolist()
                    self.masks += 1
                    allowed = FOLLOWS[token] if token in allowed else None
        return super().accept(logits, proposal)


def decode_under_a_grammar(speculates):
    engine, target = made(14, speculates=speculates, kind=Masked)
    for n, size in enumerate((40, 30, 30, 9)):
        params = SamplingParams(max_tokens=size, structured_outputs={"regex": "any"})
        grammar = Successors(FOLLOWS, VOCAB)
        engine.add(Request(prompt_ids=[70 + n] * 6, index=n, params=params, grammar=grammar))
    found = outputs(drain(engine))
    assert [found[n].text for n in range(4)] == [LONG[:n] for n in (40, 30, 30, 9)]
    assert sum(preemptions(found)) >= 2
    assert target.masks > 80


@pytest.mark.parametrize("speculates", [False, True])
def test_a_request_that_was_put_off_goes_on_where_its_grammar_was(speculates):
    decode_under_a_grammar(speculates)


def test_a_grammar_that_begins_again_after_a_preemption_is_caught():
    old = "self.last = self.last[-1:]"
    again = "self.sequence.grammar._followed = 0; self.last = self.last[-1:]"
    with edited([Edit(RequestState, "put_off", old, again)]), pytest.raises(AssertionError):
        decode_under_a_grammar(speculates=True)


def test_a_request_that_was_put_off_keeps_its_noise():
    engine, target = made(14, timed=True)
    for seed in (5, 5, 6):
        engine.add(request([70] * 6, max_tokens=40, temperature=1.0, seed=seed))
    found = outputs(drain(engine))
    assert sum(preemptions(found)) >= 2
    assert {opening.params.seed for opening in target.opened} == {5, derived(5, 0, 0, 1), 6}


def test_no_request_is_put_off_while_there_are_pages():
    engine, target = made(48)
    asked(engine, 40, 30, 30)
    found = outputs(drain(engine))
    assert preemptions(found) == [0, 0, 0]
    assert len(target.opened) == 3


@pytest.mark.parametrize("speculates", [False, True])
def test_texts_behind_a_window_need_its_pages_only(speculates):
    """Also where each round is dispatched before the one before it is read."""
    engine, _ = made(16, speculates=speculates, window=9)
    asked(engine, 40, 40)
    found = outputs(drain(engine))
    assert [found[n].text for n in range(2)] == [LONG[:40]] * 2
    assert preemptions(found) == [0, 0]
    everything, _ = made(16, speculates=speculates)
    asked(everything, 40, 40)
    assert sum(preemptions(outputs(drain(everything)))) > 0


def test_more_requests_run_at_once_than_if_each_had_all_its_pages():
    """Short texts that might have been long."""
    engine, _ = made(12, says="fine")
    asked(engine, 30, 30, 30)
    running = []
    while engine.has_work:
        engine.step()
        running.append(len(engine._running))
    assert max(running) == 3


def test_an_older_request_is_not_put_off_for_a_younger_one():
    engine, _ = made(14, slots=2)
    first, second = asked(engine, 34, 34)
    order = [event.request_id for event in drain(engine) if event.output]
    assert order == [first, second]


def test_requests_that_wait_keep_their_order():
    """One that was put off comes before all others."""
    engine, target = made(14)
    asked(engine, 34, 34, 34, 4, 4)
    while engine.has_work:
        engine.step()
        waiting = [state.request_id for state in engine._seats.waiting]
        assert waiting == sorted(waiting)
    assert len(target.opened) > 5


def test_a_request_that_was_put_off_can_be_cancelled_with_its_text():
    engine, _ = made(14)
    asked(engine, 40, 40)
    events = []
    while not (put_off := [s for s in engine._seats.waiting if s.times.preemptions]):
        events += engine.step()
    engine.cancel(put_off[0].request_id)
    found = outputs(events + drain(engine))
    assert found[1].finish_reason == "cancelled"
    assert LONG.startswith(found[1].text)
    assert len(found[1].text) > 5
    assert found[0].text == LONG[:40]


def test_the_prompt_that_is_still_known_is_not_run_again():
    engine, target = made(14, grain=SIZE)
    for n in range(3):
        engine.add(request([*range(70, 83)], n, max_tokens=30))
    found = outputs(drain(engine))
    assert [found[n].text for n in range(3)] == [LONG[:30]] * 3
    assert found[0].metrics["cached_tokens"] == 0
    assert found[2].metrics["cached_tokens"] == 12, "as it was when it began"
    assert all(opening.reused == 12 for opening in target.opened[1:])
    assert sum(preemptions(found))


def test_a_group_puts_off_requests_of_its_own():
    engine, _ = made(26, slots=4, groups=2)
    engine.add(request([70], 0, max_tokens=40))
    engine.add(request([71], 1, max_tokens=40))
    for n in (2, 3):
        engine.add(request([72], n, max_tokens=4))
    found = outputs(drain(engine))
    assert {output.text for output in found.values()} == {LONG[:40], LONG[:4]}
    assert preemptions(found)[2:] == [0, 0]
    assert preemptions(found)[1] > 0


def test_roles_that_failed_when_given_pages_are_given_them_again(monkeypatch):
    """The target, which was told already, is told the same."""
    deaf = At(1, RuntimeError("out of order"))
    engine, target = made(30, fail={"set_pages": deaf})
    monkeypatch.setattr(target, "set_pages", lambda slot, pages: target.pages.update({slot: pages}))
    asked(engine, 40, 30)
    events = []
    for _ in range(9):
        try:
            events += engine.step()
        except RuntimeError:
            break
    else:
        raise AssertionError("nothing has failed")
    found = outputs(events + drain(engine))
    assert [found[n].text for n in range(2)] == [LONG[:40], LONG[:30]]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=7),
    count=st.integers(16, 30),
    speculates=st.booleans(),
    grain=st.sampled_from([0, SIZE]),
    slots=st.integers(1, 4),
    cut=st.dictionaries(st.integers(0, 60), st.integers(0, 6), max_size=3),
    window=st.sampled_from([None, 1, 9]),
)
def test_texts_are_those_of_requests_alone_whatever_pages_run_out(
    sizes, count, speculates, grain, slots, cut, window
):
    engine, _ = made(count, speculates=speculates, slots=slots, grain=grain, window=window)
    for n, (prompt, most) in enumerate(sizes):
        engine.add(request([70 + n % 2] * prompt, n, max_tokens=most))
    events = []
    for step in range(1500):
        if not engine.has_work:
            break
        if step in cut:
            engine.cancel(cut[step])
        events += engine.step()
    found = outputs(events)
    assert sorted(found) == [*range(len(sizes))]
    for n, (_, most) in enumerate(sizes):
        text = found[n].text
        assert text == LONG[: len(text)]
        if found[n].finish_reason != "cancelled":
            assert text == LONG[:most]
        streamed = [token for event in events if event.request_id == n for token in event.token_ids]
        assert streamed == found[n].token_ids == ids(text)


def no_growth(self, *, puts_off):
    del self, puts_off
    return True


def as_it_was(self):
    """Believes that its keys and values are still there."""
    self.to_prefill = self.given


def forgotten(self):
    """Runs its prompt alone again."""
    self.given = self.cached = 0


class Eager(PageStock):
    """Takes back pages that the next query sees."""

    def release_hidden(self, slot, position):
        super().release_hidden(slot, position + 2 * SIZE)


def test_a_page_that_is_taken_back_too_early_is_noticed(monkeypatch):
    monkeypatch.setitem(made.__globals__, "PageStock", Eager)
    engine, _ = made(13, window=9)
    asked(engine, 40, 40, 40)
    with pytest.raises(AssertionError, match=r"two slots write to one page|another's"):
        drain(engine)


@pytest.mark.parametrize(
    ("owner", "name", "flaw"),
    [(Seats, "grow", no_growth), (Sequence, "rewind", as_it_was), (Sequence, "rewind", forgotten)],
)
def test_planted_faults_of_preemption_are_caught(owner, name, flaw, monkeypatch):
    monkeypatch.setattr(owner, name, flaw)
    engine, _ = made(14)
    asked(engine, 40, 30, 30)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        drain(engine)
