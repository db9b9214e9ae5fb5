"""Texts of drafts that share the work have exactly the target's law, however fast each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from ssd_jax.placement.parallel.by_branches import DraftByBranches, SharedBranches
from ssd_jax.placement.parallel.by_slots import DraftBySlots
from ssd_jax.speculation.division import share
from tests.placement.parallel.toys import ForToys, Part
from tests.sampling.edits import Edit, edited
from tests.selection import cases
from tests.speculation.enumeration.host import Host
from tests.speculation.enumeration.host_games import FAIR, GAME, law_of, of_row, seconds
from tests.speculation.enumeration.host_roles import ToyDraft
from tests.speculation.enumeration.laws import autoregressive
from tests.speculation.enumeration.toys import PROMPT


@dataclass(frozen=True, kw_only=True)
class Sharing(Host):
    """A host whose draft is several: `parts` of every group, `groups` of slots.

    Attributes:
      slower: how many times as long each part takes as the one before it.
    """

    parts: int = 2
    groups: int = 1
    slower: float = 1.0

    def engine(self, noise: Any, occurrences: Any = None, watch: Any = None) -> Any:
        def several(toy: ToyDraft) -> ForToys:
            def part(number: int) -> Part:
                made = Part(
                    toy._model,
                    noise,
                    toy._clock,
                    slots=-(-self.slots // self.groups),
                    k=toy.k,
                    branches=share(self.budget, self.parts),
                    width=self.width,
                    forward=lambda n: toy._forward(n) * self.slower**number,
                    patience=self.patience,
                    q_arrives=self.q_arrives,
                )
                return made

            of_groups: list[Any] = []
            for _ in range(self.groups):
                drafts = [part(number) for number in range(self.parts)]
                of_groups.append(DraftByBranches(drafts) if self.parts > 1 else drafts[0])
            together = of_groups[0]
            if self.groups > 1:
                together = DraftBySlots(of_groups, self.slots)
            toy.activity = together.activity  # what the controller asks
            return ForToys(together)

        return super().engine(noise, occurrences, several)


SETTINGS = {
    "inline": (Sharing(game=GAME, backup="draft"), {"hit"}),
    "inline, few branches": (Sharing(game=GAME, backup="draft", width=2), {"hit"}),
    "slow drafts": (Sharing(game=GAME, forward=seconds(0.55), width=1), {"hit", "miss"}),
    "one is slower": (
        Sharing(game=GAME, forward=seconds(0.4), width=1, slower=2.0),
        {"hit", "miss"},
    ),
    "one is late": (
        Sharing(game=GAME, forward=seconds(0.3), patience=0.2, slower=6.0),
        {"hit"},
    ),
    "n-grams after a miss": (
        Sharing(game=GAME, forward=seconds(0.55), width=1, backup="ngram"),
        {"hit", "miss"},
    ),
    "late q": (
        Sharing(game=GAME, forward=seconds(0.55), q_arrives=lambda number: number % 2 == 0),
        {"hit"},
    ),
}


@pytest.mark.parametrize("length", [5, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", cases(SETTINGS))
def test_drafts_that_share_branches_keep_the_law(setting, length):
    host, sources = SETTINGS[setting]
    law, seen = law_of(host, [(0, 0)], length)
    assert of_row(law, 0) == autoregressive(GAME.target, PROMPT, length)
    assert {source for source in seen if isinstance(source, str)} >= sources


@pytest.mark.parametrize("parts", [1, 2])
def test_drafts_that_share_slots_keep_the_law(parts):
    host = Sharing(
        game=FAIR, forward=seconds(0.55), width=1, budget=2, slots=2, groups=2, parts=parts
    )
    law, _ = law_of(host, [(0, 0), (0, 1)], 3)
    alone = autoregressive(FAIR.target, PROMPT, 3)
    assert law == {(a, b): alone[a] * alone[b] for a in alone for b in alone}


# A worker keeps to itself what it has drafted like the bonus token.
SELECTIVE = Edit(
    SharedBranches,
    "join",
    "np.nonzero(self.part == number)",
    "np.nonzero((self.part == number) & np.take_along_axis("
    "part.tokens[..., 0] != part.bonus, self.number, axis=1))",
)


def test_a_part_that_selects_by_content_has_another_law():
    with edited([SELECTIVE]):
        law, _ = law_of(Sharing(game=GAME, forward=seconds(0.3), backup="none"), [(0, 0)], 5)
    assert of_row(law, 0) != autoregressive(GAME.target, PROMPT, 5)
