"""What decides a length never looks at what is drafted, nor, without a clock, at another row.

No statistics: the same rounds twice, with something exchanged that must not matter.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ssd_jax.speculation.backup import KINDS
from ssd_jax.speculation.fan_out import ConfidenceFanOut, GeometricFanOut, MeasuredFanOut
from ssd_jax.speculation.fan_out_flag import POLICIES
from ssd_jax.testing.by_row import promoted
from tests.fakes.stepwise import StepwiseDraft
from tests.selection import cases
from tests.speculation.enumeration.host import Hashed, Host, texts
from tests.speculation.enumeration.rounds import Game
from tests.speculation.enumeration.toys import table

# Four tokens, and a draft that is sure of some.
TARGET = table(((6, 2, 1, 1), (1, 5, 3, 1), (2, 2, 3, 3), (1, 1, 1, 7)), memory=2)
DRAFT = table(((5, 2, 2, 1), (1, 14, 4, 1), (2, 2, 2, 2), (1, 2, 1, 4)), memory=2)
GAME = Game(target=TARGET, draft=DRAFT, k=3)
NAMES = [(seed, index) for seed in (1, 2) for index in (0, 1)]


class Watched(StepwiseDraft):
    """A branching draft, and what a controller asks of it.

    Args:
      exchanged: in which round its branches have other tokens, and another confidence in them.
      kept: (slot, row) of branches that stay as they are.
    """

    def __init__(
        self, draft: Any, exchanged: int = 0, exchanged_at: Collection[tuple[int, int]] = ()
    ) -> None:
        self._draft, self._exchanged, self._exchanged_at = draft, exchanged, exchanged_at
        self.asked: list[list[Any]] = [[]]
        """By round, which begins where it looks for the first branches."""
        self.winners: list[list[tuple[int, int]]] = [[]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def branch_tokens(self, forwards, until=None):
        found = self._draft.branch_tokens(forwards, until)
        if until is not None:
            self.asked.append([])
            self.winners.append([])
        self.asked[-1].append(("branch_tokens", forwards))
        if found is None or isinstance(found, str) or len(self.asked) - 1 != self._exchanged:
            return found
        here = np.ones(found.lengths.shape, bool)
        for slot, row in self._exchanged_at:
            here[slot, row] = False
        tokens, confidence = found.tokens.astype(int), found.confidence.astype(int)
        return found._replace(
            tokens=np.where(here[..., None], (tokens + 1) % 4, tokens),
            confidence=np.where(here[..., None], 7 - confidence, confidence),
        )

    def promote(self, promotion):
        moves = promoted(promotion)
        self.asked[-1].append(("promote", [(m.slot, m.winner, m.limit, *m.tokens) for m in moves]))
        self.winners[-1] += [(move.slot, move.winner) for move in moves if move.winner >= 0]
        self._draft.promote(promotion)

    def draft(self, limits, *, lowered):
        self.asked[-1].append(("draft", limits.tolist(), lowered.tolist()))
        return self._draft.draft(limits, lowered=lowered)

    def branch_off(self, counts, *, follow, lowered, forwards, skip=None):
        self.asked[-1].append(("expand", forwards, follow.tolist(), lowered.tolist()))
        self.asked[-1].append(("fan-out", counts.tolist()))
        self._draft.branch_off(counts, follow=follow, lowered=lowered, forwards=forwards, skip=skip)


def play(host: Host, **exchanged: Any) -> Watched:
    watched: list[Watched] = []

    def watch(draft):
        watched.append(Watched(draft, **exchanged))
        return watched[0]

    texts(host.engine(Hashed(), watch=watch), NAMES, 12)
    return watched[0]


ELSEWHERE = Host(game=GAME, forward=lambda _number: 0.4, budget=6, slots=2)
HOSTS = {
    "inline": replace(ELSEWHERE, forward=None, backup="draft"),
    "elsewhere": ELSEWHERE,
    "few branches": replace(ELSEWHERE, width=1, fan_out=MeasuredFanOut),
    "slow": replace(ELSEWHERE, forward=lambda _number: 0.8, fan_out=GeometricFanOut),
    "late": replace(ELSEWHERE, forward=lambda number: (0.4, 3.0)[number % 2], patience=0.5),
    "n-grams": replace(ELSEWHERE, width=1, backup="ngram"),
    "random": replace(ELSEWHERE, width=1, backup="random"),
    "by confidence": replace(ELSEWHERE, fan_out=ConfidenceFanOut, backup="draft"),
}
_PLAYED = {host.fan_out for host in HOSTS.values()}
HOSTS |= {
    name: replace(ELSEWHERE, fan_out=policy.make)
    for name, policy in POLICIES.items()
    if policy.make not in _PLAYED
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_a_round_does_not_look_at_the_tokens_of_branches(host):
    """Lengths, hits, waits, Saguaro's D and fan-outs stay; but a fan-out by confidence looks at the
    record that was chosen, and only at that."""
    usual, reads = play(host), host.fan_out().reads_confidence
    sizes, changed = set(), 0
    for round_ in range(1, len(usual.asked)):
        other = play(host, exchanged=round_)
        without = [
            [event for event in run.asked[round_] if event[0] != "fan-out"]
            for run in (usual, other)
        ]
        assert without[0] == without[1]
        assert usual.asked[:round_] == other.asked[:round_]
        if reads:
            changed += usual.asked[round_] != other.asked[round_]
            other = play(host, exchanged=round_, exchanged_at=usual.winners[round_])
        assert usual.asked[round_] == other.asked[round_]
        sizes |= {event[0] for event in usual.asked[round_]}
    assert {"branch_tokens", "promote", "expand"} <= sizes
    assert changed or not reads


def own_lengths(host: Host, neighbour: int) -> list[int]:
    """L of each round of one request beside others, whose accept counts are those of a seed."""
    engine, one = host.engine(Hashed()), (0, 0)
    texts(engine, [one, (neighbour, 1), (neighbour, 2)], 20)
    return [length for name, length in engine._target.lengths if name == one]


NEIGHBOURS = range(3, 15)


@pytest.mark.parametrize(
    "fan_out",
    cases(
        [policy.make for policy in POLICIES.values()],
        *(MeasuredFanOut, ConfidenceFanOut),
    ),
)
@pytest.mark.parametrize("backup", KINDS)
@pytest.mark.parametrize("width", cases([1, 4], 4))
def test_lengths_of_a_row_do_not_change_with_what_its_neighbours_accept(fan_out, backup, width):
    """Where noise is not unique: in one process, with K and M that were given."""
    host = replace(ELSEWHERE, forward=None, fan_out=fan_out, backup=backup, width=width)
    assert not host.engine(Hashed())._drafter.timed
    found = [own_lengths(host, neighbour) for neighbour in NEIGHBOURS]
    assert all(text == found[0] for text in found)
    assert len(set(found[0])) > 1


def test_lengths_that_follow_a_clock_depend_on_neighbours_and_get_unique_noise():
    host = replace(ELSEWHERE, forward=lambda _number: 0.55, width=1)
    assert host.engine(Hashed())._drafter.timed
    found = [own_lengths(host, neighbour) for neighbour in NEIGHBOURS]
    assert any(text != found[0] for text in found)
