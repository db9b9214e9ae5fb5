"""Whose noise a request gets where another one of its seed and index was there before."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.requests.occurrences import Occurrences, derived
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.roles.activity import Activity
from ssd_jax.speculation.backup import RandomBackup
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.tuned_drafter import TunedDrafter
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan
from ssd_jax.testing.fakes import Clock, FakeDrafter, FakeTarget, Letters
from tests.engine.letters import LONG, drain, outputs, request, spell
from tests.fakes.tuners import Restless
from tests.speculation.watched import EOS, TOKENS, ssd

PAIR = (2**64 - 1, 2**32 - 1)


def test_the_first_request_of_a_seed_keeps_it_and_later_ones_get_others():
    occurrences = Occurrences()
    seeds = [occurrences.seed(7, 0) for _ in range(50)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 50
    assert occurrences.seed(7, 1) == 7
    assert occurrences.seed(8, 0) == 8
    assert [occurrences.seed(7, index) for index in (0, 1)] == [
        derived(7, 0, 0, 50),
        derived(7, 1, 0, 1),
    ]
    assert occurrences.seed(*PAIR) == PAIR[0]
    assert 0 <= occurrences.seed(*PAIR) < 2**64


def test_derived_seeds_never_change():
    """Else the texts of a script that asks twice would."""
    assert derived(0, 0, 0, 1) == 11155856847998307516
    assert derived(7, 2**32 - 1, 0, 2) == 9024759494565616787
    assert derived(2**64 - 1, 0, 1, 0) == 5896880085097691949


def test_a_forgotten_seed_is_not_given_again():
    occurrences = Occurrences(capacity=4)
    asked = [(seed, index) for seed in (0, 1, 2) for index in (0, 1, 2)] * 20
    seeds = [(index, occurrences.seed(seed, index)) for seed, index in asked]
    assert len(set(seeds)) == len(seeds)
    assert len(occurrences._counts) <= 4
    assert [seed for _, seed in seeds[:4]] == [0, 0, 0, 1]  # before anything was forgotten


def test_two_threads_never_get_the_same_seed():
    occurrences, seeds = Occurrences(), []

    def ask():
        seeds.extend([occurrences.seed(0, 0) for _ in range(2000)])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(seeds)) == 8000


def test_a_line_says_that_seeds_change_before_the_first_request_is_counted():
    counts = []
    occurrences = Occurrences(capacity=1, first=lambda: counts.append(len(occurrences._counts)))
    assert not counts
    for index in range(5):
        occurrences.seed(0, index)
    assert counts == [0]


def growing(*, grows: bool = True) -> PageStock:
    """Pages for two texts of `ssd`, which need them all at once or are put off."""
    return PageStock(slots=2, count=16, size=8, beyond=4, context=64, grows=grows)


SETTINGS = {
    "inline": ({}, False),
    "inline, coupled": ({"rule": "coupled"}, False),
    "elsewhere": ({"remote": True}, True),
    "elsewhere, block": ({"remote": True, "rule": "block"}, True),
    "elsewhere, coupled": ({"remote": True, "rule": "coupled"}, False),
    "lengths chosen": ({"tuner": Restless((1, 2), (8,))}, True),
    "lengths chosen, block": ({"tuner": Restless((1, 2), (8,)), "rule": "block"}, True),
    "lengths chosen, coupled": ({"tuner": Restless((1, 2), (8,)), "rule": "coupled"}, False),
    "lengths given": ({"tuner": FixedTuner(SpeculationPlan(k=3, budget=8))}, False),
    "a pace": ({"pace": Pace()}, True),
    "a draft that says when it was busy": ({"activity": Activity}, True),
    "pages that grow": ({"pages": growing()}, True),
    "pages that grow, coupled": ({"pages": growing(), "rule": "coupled"}, False),
    "pages for whole texts": ({"pages": growing(grows=False)}, False),
}


@pytest.mark.parametrize(("settings", "timed"), SETTINGS.values(), ids=SETTINGS)
def test_noise_is_unique_where_lengths_depend_on_time(settings, timed):
    parts = ssd(spell(LONG), budget=8, **settings)
    assert parts.controller.timed == timed
    expected = [5, derived(5, 0, 0, 1) if timed else 5, 5]
    asked = [request(seed=5, temperature=1.0, index=index) for index in (0, 0, 1)]
    ids = [parts.engine.add(request) for request in asked]
    found = outputs(drain(parts.engine))
    assert [opening.params.seed for opening in parts.target.opened] == expected
    assert [opening.index for opening in parts.target.opened] == [0, 0, 1]
    # Callers see what they gave.
    assert [found[request_id].prompt_index for request_id in ids] == [0, 0, 1]
    assert [request.params.seed for request in asked] == [5, 5, 5]


def test_both_roles_and_the_backup_have_the_same_seed():
    parts = ssd(spell(LONG), remote=True, backup="random", rank=lambda prompt, position: None)
    opened, open_draft = [], parts.draft.open
    parts.draft.open = lambda opening: (opened.append(opening.params.seed), open_draft(opening))
    for _ in range(2):
        parts.engine.add(request(seed=5, temperature=1.0, max_tokens=20))
        drain(parts.engine)
    derived_seed = derived(5, 0, 0, 1)
    assert opened == [opening.params.seed for opening in parts.target.opened] == [5, derived_seed]
    rows, drafted = parts.controller.rounds[-2]
    limit = rows[0].limit
    random = RandomBackup(derived_seed, 0, TOKENS).propose(rows[0].position, limit)
    assert drafted.tokens[0, :limit].tolist() == random


@pytest.mark.parametrize(
    ("case", "k", "timed"),
    [
        ("inline", 3, False),
        ("pages that grow", 3, False),  # what is dropped there is drawn again
        ("a pace", 3, False),
        ("elsewhere", 3, True),
        ("lengths chosen", 3, True),
        ("elsewhere, coupled", 3, False),
        ("inline", 0, False),
        ("elsewhere", 0, False),
    ],
)
def test_requests_without_branches_have_noise_of_their_own_where_their_lengths_depend_on_time(
    case, k, timed
):
    parts = ssd(spell(LONG), budget=8, **SETTINGS[case][0])
    asked = dataclasses.replace(request(seed=5, temperature=1.0), k=k, branches=False)
    for _ in range(2):
        parts.engine.add(asked)
    drain(parts.engine)
    seeds = [opened.params.seed for opened in parts.target.opened]
    assert seeds == [5, derived(5, 0, 0, 1) if timed else 5]


def test_a_planner_that_may_change_k_counts_for_requests_without_branches_too():
    parts = ssd(spell(LONG), budget=8)
    parts.engine._prompts._openings._timed = True  # as a planner's decisions by time make it
    for k in (3, None):
        for _ in range(2):
            asked = request(seed=5, temperature=1.0, index=k or 0)
            parts.engine.add(dataclasses.replace(asked, k=k, branches=False))
    drain(parts.engine)
    seeds = [opened.params.seed for opened in parts.target.opened]
    assert seeds == [5, 5, 5, derived(5, 0, 0, 1)]


def test_greedy_requests_are_not_counted():
    parts = ssd(spell(LONG), remote=True)
    for temperature in (0.0, 0.0, 1.0):
        parts.engine.add(request(seed=5, temperature=temperature))
    drain(parts.engine)
    assert {opening.params.seed for opening in parts.target.opened} == {5}


def test_engines_count_together_also_the_requests_of_those_that_use_no_number():
    """A round of one lasts longer while another decodes beside it."""
    occurrences = Occurrences()
    target = FakeTarget(spell(LONG))
    drafters = [None, FakeDrafter(spell(LONG)), FakeDrafter(spell(LONG))]
    drafters[2] = TunedDrafter(drafters[2], Restless((1, 2), (8,)))
    assert drafters[2].timed
    assert TunedDrafter(FakeDrafter(LONG), Restless((1,), (8,)), rule="block").timed
    assert not TunedDrafter(FakeDrafter(LONG), Restless((1,), (8,)), rule="coupled").timed
    for drafter in drafters:
        engine = Engine(
            target,
            Letters,
            frozenset({EOS}),
            drafter=drafter,
            clock=Clock(),
            occurrences=occurrences,
        )
        engine.add(request(seed=5, temperature=1.0))
        drain(engine)
    assert [opening.params.seed for opening in target.opened] == [5, 5, derived(5, 0, 0, 2)]
