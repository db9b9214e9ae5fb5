"""The product's own engine, controller, cache, pace and backups emit exactly the target's law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ssd_jax.engine.requests.occurrences import Occurrences
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation import controller
from ssd_jax.speculation.fan_out import ConfidenceFanOut, GeometricFanOut, MeasuredFanOut
from ssd_jax.speculation.fan_out_flag import POLICIES
from ssd_jax.speculation.sequence_state import RoundState
from ssd_jax.speculation.tuner import SpeculationPlan
from tests.sampling.edits import Edit, edited
from tests.selection import cases
from tests.speculation.enumeration.host import Hashed, Host, texts
from tests.speculation.enumeration.host_games import FAIR, GAME, law_of, of_row, seconds
from tests.speculation.enumeration.laws import autoregressive
from tests.speculation.enumeration.rounds import block, ratio
from tests.speculation.enumeration.toys import PROMPT

HOST = Host(game=FAIR, forward=lambda _number: 0.55, width=1, budget=2)


class Same(Occurrences):
    """Every request of a seed and index has the same noise."""

    def seed(self, seed: int, index: int) -> int:
        return seed


class Changing:
    """Another K and M each round."""

    def __init__(self):
        self._plans = 0

    def plan(self, *, rows, steps):
        self._plans += 1
        return SpeculationPlan.of_branches(1 + self._plans % 2, 2 + self._plans % 3 % 2)

    def observe(self, verified):
        raise AssertionError("sampled rows teach nothing")


SETTINGS = {
    "inline": ({"backup": "draft"}, {"hit"}),
    "inline, few branches": ({"backup": "draft", "width": 1}, {"hit", "miss"}),
    "a fast draft": ({"forward": seconds(0.3), "width": 1}, {"hit", "miss"}),
    "a slow draft": ({"forward": seconds(0.55), "width": 1}, {"hit", "miss"}),
    "a slower draft": ({"forward": seconds(0.8), "width": 1}, {"hit", "miss"}),
    "a draft slower than the target": ({"forward": seconds(1.3), "width": 1}, {"hit", "miss"}),
    "nothing after a miss": (
        {"forward": seconds(0.55), "width": 1, "backup": "none"},
        {"hit", "miss"},
    ),
    "n-grams after a miss": (
        {"forward": seconds(0.55), "width": 1, "backup": "ngram"},
        {"hit", "miss"},
    ),
    "random tokens after a miss": (
        {"forward": seconds(0.55), "width": 1, "backup": "random"},
        {"hit", "miss"},
    ),
    "the draft after a miss": (
        {"forward": seconds(0.55), "width": 1, "backup": "draft"},
        {"hit", "miss"},
    ),
    "K and M that change": ({"tuner": Changing, "forward": seconds(0.55)}, {"hit", "miss"}),
    "late news": (
        {"forward": lambda number: (0.55, 3.5)[number % 2], "patience": 0.6},
        {"hit", "late", "stale"},
    ),
    "late q": (
        {"forward": seconds(0.55), "q_arrives": lambda number: number % 2 == 0},
        {"hit"},
    ),
    "geometric": (
        {"forward": seconds(0.55), "fan_out": GeometricFanOut, "budget": 2},
        {"hit", "miss"},
    ),
    "measured": (
        {"fan_out": lambda: MeasuredFanOut(acceptance=0.5, weight=0.5), "forward": seconds(0.55)},
        {"hit", "miss"},
    ),
    "confidence": (
        {"fan_out": lambda: ConfidenceFanOut(acceptance=0.5, weight=0.5), "forward": seconds(0.55)},
        {"hit", "miss"},
    ),
}
SETTINGS |= {
    name: ({"fan_out": policy.make, "forward": seconds(0.55)}, {"hit"})
    for name, policy in POLICIES.items()
    if name not in SETTINGS and policy.make is not Host.fan_out
}


BY_DEFAULT = ("inline, few branches", "a slow draft", "K and M that change", "late news", "late q")


@pytest.mark.parametrize(
    ("name", "verify"),
    [(name, ratio) for name in SETTINGS]
    + cases([(name, block) for name in SETTINGS], *((name, block) for name in BY_DEFAULT)),
)
def test_the_host_keeps_the_law(name, verify):
    settings, sources = SETTINGS[name]
    law, seen = law_of(Host(game=replace(GAME, verify=verify), **settings), [(0, 0)], 6)
    assert of_row(law, 0) == autoregressive(GAME.target, PROMPT, 6)
    assert {source for source in seen if isinstance(source, str)} >= sources


# Serves no last tokens that the draft is unsure of.
WITHOUT_UNSURE_TAILS = Edit(
    RoundState,
    "count_won",
    "self.lengths[slot] = length",
    "while length and branches.confidence[slot, winner, length - 1] < 4:\n"
    "            length -= 1\n"
    "        self.lengths[slot] = length",
)


@pytest.mark.parametrize("name", ["inline", "a slow draft", "confidence"])
def test_a_look_up_that_selects_by_content_has_another_law(name):
    with edited([WITHOUT_UNSURE_TAILS]):
        law, _ = law_of(Host(game=GAME, **SETTINGS[name][0]), [(0, 0)], 5)
    assert of_row(law, 0) != autoregressive(GAME.target, PROMPT, 5)


def test_proposals_depend_on_the_clock_where_branches_are_waited_for():
    """Else the tests above would be of one and the same run."""
    lengths = set()
    for taken in (0.3, 0.55, 0.8, 1.3):
        engine = Host(game=FAIR, forward=seconds(taken), width=1).engine(Hashed())
        texts(engine, [(0, 0)], 40)
        lengths.add(tuple(length for _, length in engine._target.lengths))
    assert len(lengths) > 2
    assert {0, 1, 2} == {length for taken in lengths for length in taken}


WHERE = {"beside": (replace(HOST, slots=2), 5), "after": (replace(HOST, forward=seconds(0.8)), 4)}
"""Hosts, and tokens of each text: as many as show what the same noise would do."""


@pytest.mark.more
@pytest.mark.parametrize(
    ("host", "tokens"),
    [
        pytest.param(*WHERE["beside"], marks=pytest.mark.slow, id="beside"),
        pytest.param(WHERE["beside"][0], 4, id="beside, shorter"),
        pytest.param(replace(WHERE["beside"][0], chunk=8), 4, id="from one round on"),
        pytest.param(*WHERE["after"], id="after"),
    ],
)
def test_two_requests_of_one_seed_and_index_are_independent_where_lengths_are_timed(host, tokens):
    law, _ = law_of(host, [(0, 0), (0, 0)], tokens)
    alone = autoregressive(FAIR.target, PROMPT, tokens)
    assert law == {(a, b): alone[a] * alone[b] for a in alone for b in alone}


@pytest.mark.more
@pytest.mark.parametrize(("host", "tokens"), WHERE.values(), ids=WHERE)
def test_so_they_are_under_block_verification(host, tokens):
    host = replace(host, game=replace(FAIR, verify=block))
    law, _ = law_of(host, [(0, 0), (0, 0)], 4)
    alone = autoregressive(FAIR.target, PROMPT, 4)
    assert law == {(a, b): alone[a] * alone[b] for a in alone for b in alone}


@pytest.mark.parametrize(("host", "tokens"), WHERE.values(), ids=WHERE)
def test_block_verification_taken_for_untimed_biases_the_second(monkeypatch, host, tokens):
    untimed = replace(RULES["block"], timed=False)
    monkeypatch.setattr(controller, "RULES", RULES | {"block": untimed})
    host = replace(host, game=replace(FAIR, verify=block))
    law, _ = law_of(host, [(0, 0), (0, 0)], tokens)
    alone = autoregressive(FAIR.target, PROMPT, tokens)
    assert of_row(law, 0) == alone
    assert of_row(law, 1) != alone


@pytest.mark.parametrize(("host", "tokens"), WHERE.values(), ids=WHERE)
def test_a_second_request_with_the_same_noise_would_be_biased(host, tokens):
    law, _ = law_of(host, [(0, 0), (0, 0)], tokens, Same)
    alone = autoregressive(FAIR.target, PROMPT, tokens)
    assert of_row(law, 0) == alone
    assert of_row(law, 1) != alone


@pytest.mark.parametrize("slots", [1, 2])
def test_inline_two_requests_of_one_seed_say_the_same_and_each_keeps_its_law(slots):
    """No length depends on time or on another row there."""
    host = replace(HOST, forward=None, slots=slots, backup="draft")
    law, _ = law_of(host, [(0, 0), (0, 0)], 5)
    assert all(one == other for one, other in law)
    assert of_row(law, 1) == autoregressive(FAIR.target, PROMPT, 5)


# Chi-square of 16 texts: a true law exceeds it with a probability of 1e-10.
MOST = 83.0
EXPERIMENTS = {"beside": (replace(HOST, slots=2), 6, 6000), "after": (*WHERE["after"], 1000)}


@pytest.mark.slow  # the laws above are the same, worked out
@pytest.mark.parametrize(("host", "length", "runs"), EXPERIMENTS.values(), ids=EXPERIMENTS)
@pytest.mark.parametrize("occurrences", [Occurrences, Same])
def test_the_later_of_two_requests_of_one_seed_and_index_is_counted(
    host, length, runs, occurrences
):
    """Texts of engines with hashed noise, one for each seed: how often each of 16 came."""
    counts = Counter(
        texts(host.engine(Hashed(), occurrences()), [(seed, 0)] * 2, length)[1][:4]
        for seed in range(runs)
    )
    alone = autoregressive(FAIR.target, PROMPT, 4)
    far = sum((counts[text] - runs * p) ** 2 / (runs * p) for text, p in alone.items())
    assert (far > MOST) == (occurrences is Same)
