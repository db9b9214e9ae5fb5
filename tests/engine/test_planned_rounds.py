"""Rounds without the drafter of an engine that has one: by request, and by a planner."""

import dataclasses
import random

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.planner import RoundPlan
from ssd_jax.engine.requests.occurrences import derived
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.errors import InputError
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters
from tests.engine.letters import EOS, LONG, drain, ids, outputs, request, spell
from tests.fakes.instrument import instrument

CHUNK = 4


class Scripted:
    """A planner that says these K, one a round, the last for ever."""

    timed = False

    def __init__(self, *ks):
        self.ks, self.reaches = list(ks), []

    def plan(self, reach):
        self.reaches.append(reach)
        return RoundPlan(self.ks.pop(0) if len(self.ks) > 1 else self.ks[0])


def make(planner=None, *, slots=2, k=3, wrong=lambda position: False, **settings):
    """Target, drafter and engine; `target.calls` has the drafter's prefills and proposals, too."""
    target = FakeTarget(spell(LONG), slots=slots, max_chunk=CHUNK)
    drafter = FakeDrafter(spell(LONG), k=k, slots=slots, wrong=wrong)
    engine = Engine(
        target,
        Letters,
        frozenset({EOS}),
        drafter=drafter,
        clock=Clock(),
        planner=planner,
        **settings,
    )
    drafted = []
    note = {
        "prefill": lambda slot, tokens, offset, *, last: drafted.append(
            (slot, offset, len(tokens), last)
        )
    }
    instrument(drafter, note=note)
    target.drafted = drafted
    instrument(target, note={"read": target.calls})
    return target, drafter, engine


def plain(k=0, **params):
    return asked(k, **params)


def asked(k, **params):
    made = request(**params)
    object.__setattr__(made, "k", k)
    return made


def test_a_request_without_a_draft_is_decoded_as_in_an_engine_without_one():
    target, drafter, engine = make()
    engine.add(plain(max_tokens=5))
    output = outputs(drain(engine))[0]
    assert output.token_ids == ids(LONG[:5])
    assert (output.metrics["mode"], output.metrics["acceptance_length"]) == ("ar", None)
    ahead = ["forward", "read"] * 3
    assert target.calls == ["prefill", "read", "forward", *ahead, "read"]
    assert target.drafted == []
    assert drafter.limits == []


def test_requests_with_and_without_a_draft_share_rounds():
    target, _, engine = make()
    plain_id, drafted_id = engine.add(plain(max_tokens=20)), engine.add(request(max_tokens=20))
    found = outputs(drain(engine))
    for output in found.values():
        assert output.text == LONG[:20]
    assert found[plain_id].metrics["acceptance_length"] is None
    assert found[drafted_id].metrics["acceptance_length"] > 3
    assert {slot for slot, *_ in target.drafted} == {1}
    alone = [*["forward", "read"] * 8, "read"]  # it looks ahead again
    assert target.calls[-len(alone) :] == alone


@pytest.mark.parametrize("k", [1, 2])
def test_a_request_may_have_shorter_proposals(k):
    _, drafter, engine = make()
    engine.add(asked(k, max_tokens=20))
    assert outputs(drain(engine))[0].text == LONG[:20]
    assert max(drafter.limits) == k


@pytest.mark.parametrize("k", [-1, 4])
def test_a_proposal_that_is_too_long_is_refused(k):
    _, _, engine = make()
    with pytest.raises(InputError, match=f"k = {k} is out of range; this engine has 0 to 3"):
        engine.add(asked(k))
    assert not engine.has_work


def test_rounds_look_ahead_while_the_planner_does_without_the_draft():
    target, _, engine = make(Scripted(0))
    engine.add(request(max_tokens=6))
    assert outputs(drain(engine))[0].text == LONG[:6]
    ahead = ["forward", "read"] * 4
    assert target.calls == ["prefill", "read", "forward", *ahead, "read"]
    assert target.drafted == []


def test_a_request_with_a_k_of_its_own_has_it_whatever_the_planner_says():
    _, drafter, engine = make(Scripted(0))
    engine.add(asked(3, max_tokens=20))
    output = outputs(drain(engine))[0]
    assert (output.text, output.metrics["plain_rounds"]) == (LONG[:20], 0)
    assert max(drafter.limits) == 3


def test_a_drafter_catches_up_a_chunk_a_round_and_holds_up_none():
    target, drafter, engine = make(Scripted(*[0] * 14, 3), slots=1)
    engine.add(request(max_tokens=40))
    assert outputs(drain(engine))[0].text == LONG[:40]
    sizes = [size for _, _, size, _ in target.drafted]
    assert max(sizes[:-1]) == CHUNK
    assert sum(sizes) > 12
    assert [last for *_, last in target.drafted] == [False] * (len(sizes) - 1) + [True]
    offsets = [offset for _, offset, _, _ in target.drafted]
    assert offsets == [sum(sizes[:place]) for place in range(len(sizes))]
    assert drafter.limits  # and then it proposes


def test_the_planner_is_told_how_far_slots_have_requests():
    planner = Scripted(3)
    _, _, engine = make(planner, slots=3)
    for tokens in (4, 20, 4, 4):
        engine.add(request(max_tokens=tokens))
    drain(engine)
    assert planner.reaches[0] == 3  # of three slots
    assert planner.reaches[-1] == 2  # the long text alone is in the second


@pytest.mark.parametrize("seed", range(30))
def test_texts_are_the_same_however_often_the_planner_changes_its_mind(seed):
    """The drafter of the fakes refuses a text with a gap, and one that it was given before."""
    draw = random.Random(seed)
    plan = [draw.choice([0, 0, 1, 3]) for _ in range(200)]
    stock = PageStock(slots=2, count=24, size=4, beyond=4, context=64, grain=4, grows=True)
    target, _, engine = make(
        Scripted(*plan),
        wrong=lambda position: position % 5 == 0,
        pages=stock if seed % 2 else None,
    )
    expected = {}
    for place in range(8):
        size = draw.randrange(1, 40)
        prompt = [65] * draw.randrange(1, 12)
        k = draw.choice([None, None, 0, 2])
        made = request(prompt, max_tokens=size)
        object.__setattr__(made, "k", k)
        expected[engine.add(made)] = LONG[:size]
        if place == 4:
            engine.cancel(draw.choice(list(expected)), silent=True)
    found = {number: output.text for number, output in outputs(drain(engine)).items()}
    assert len(found) >= 7
    assert found == {number: expected[number] for number in found}
    running = [slot for slot, *_ in target.drafted]
    assert set(running) <= {0, 1}


class OutOfReach(FakeDrafter):
    """A draft of mode ssd whose worker answers nothing."""

    branches = True

    def propose(self, batch):
        proposed = super().propose(batch)
        sources = {int(slot): "dead" for slot in batch.slots}
        return dataclasses.replace(proposed, lengths=0 * proposed.lengths, sources=sources)


@pytest.mark.parametrize(("branches", "mode"), [(False, "sd"), (True, "ssd")])
def test_a_text_whose_draft_is_away_has_the_mode_that_was_planned_and_its_rounds_ran_alone(
    branches, mode
):
    class Planned(Scripted):
        def plan(self, rows):
            return RoundPlan(3, branches)

    target = FakeTarget(spell(LONG), slots=2)
    drafter = OutOfReach(spell(LONG), slots=2)
    engine = Engine(
        target, Letters, frozenset({EOS}), drafter=drafter, clock=Clock(), planner=Planned()
    )
    engine.add(request(max_tokens=6))
    output = outputs(drain(engine))[0]
    assert (output.text, output.metrics["mode"]) == (LONG[:6], mode)
    assert output.metrics["miss_causes"] == {"dead": 4}  # the last round has no room to propose
    assert engine.monitor.view().counts.rounds == {"ar": 4, mode: 1}


def test_pages_are_shared_only_as_far_as_the_drafter_has_filled_them():
    stock = PageStock(slots=1, count=16, size=2, beyond=4, context=64, grain=2)
    _, _, engine = make(Scripted(0), slots=1, pages=stock)
    prompt = [65, 66, 67, 68, 69]
    cached = []
    for k in (None, None, 0, 0):
        made = request(prompt, max_tokens=4)
        object.__setattr__(made, "k", k)
        engine.add(made)
        cached += [output.metrics["cached_tokens"] for output in outputs(drain(engine)).values()]
    assert cached == [0, 0, 0, 4]  # requests without a draft share their own


def test_noise_is_a_requests_own_where_a_planner_goes_by_the_clock():
    planner = Scripted(3)
    planner.timed = True
    target, _, engine = make(planner)
    for k in (None, None, 0):
        made = request(temperature=1.0, seed=7, max_tokens=2)
        object.__setattr__(made, "k", k)
        engine.add(made)
        drain(engine)
    seeds = [opening.params.seed for opening in target.opened]
    assert seeds == [7, derived(7, 0, 0, 1), 7]
