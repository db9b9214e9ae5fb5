"""Texts of drafts that share the branches of trees have exactly the target's law."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from ssd_jax.placement.parallel.by_branches import DraftByBranches, SharedBranches
from tests.placement.parallel.toys import ForToys, PartOfToys
from tests.sampling.edits import Edit, edited
from tests.speculation.enumeration.host_games import seconds
from tests.speculation.enumeration.rounds import coupled, ratio
from tests.speculation.enumeration.test_tree_host import TWO, by_start, expected, run
from tests.speculation.enumeration.tree_host import TreeHost
from tests.speculation.enumeration.tree_roles import TreeDraft


class TreePart(PartOfToys, TreeDraft):
    """A toy that is one of several."""


@dataclass(frozen=True, kw_only=True)
class Sharing(TreeHost):
    """A host whose draft is several; `budget` is branches of each.

    Attributes:
      slower: how many times as long the second part takes as the first.
    """

    parts: int = 2
    slower: float = 1.0

    def engine(self, noise: Any, occurrences: Any = None, watch: Any = None) -> Any:
        def several(toy: Any) -> ForToys:
            settings = self.draft_settings | {"nodes": self.nodes, "shape": self.shape}
            parts = [
                TreePart(
                    toy._model,
                    noise,
                    toy._clock,
                    drawing=toy._drawing,
                    strict=self.strict,
                    **settings | {"forward": lambda n, m=m: toy._forward(n) * self.slower**m},
                )
                for m in range(self.parts)
            ]
            together = DraftByBranches(parts)
            toy.activity = together.activity
            return ForToys(together)

        joined = replace(self, budget=self.budget * self.parts)
        return super(Sharing, joined).engine(noise, occurrences, several)


SETTINGS = {
    "every outcome": (Sharing(game=TWO, budget=6), {"hit"}),
    "some outcomes": (Sharing(game=TWO, width=1, budget=1), {"hit", "miss"}),
    "shapes by start": (Sharing(game=TWO, shape=by_start, width=1, budget=2), {"hit", "miss"}),
    "one is slower": (
        Sharing(game=TWO, forward=seconds(0.4), width=1, budget=1, slower=2.0),
        {"hit", "miss"},
    ),
    "n-grams after a miss": (
        Sharing(game=TWO, width=1, budget=1, backup="ngram"),
        {"hit", "miss"},
    ),
}


@pytest.mark.parametrize("rule", [coupled, ratio])
@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_that_share_branches_of_trees_keep_the_law(setting, rule):
    host, sources = SETTINGS[setting]
    host = replace(host, game=replace(host.game, verify=rule))
    found = run(host, 4)
    assert found.law == expected(host, 4)
    assert not found.differs
    assert {source for source in found.seen if isinstance(source, str)} >= sources
    assert setting != "every outcome" or not found.seen["miss"]


# A part keeps to itself the trees that begin like their bonus token.
SELECTIVE = Edit(
    SharedBranches,
    "join",
    "np.nonzero(self.part == number)",
    "np.nonzero((self.part == number) & np.take_along_axis("
    "part.tokens[..., 0] != part.bonus, self.number, axis=1))",
)


def test_a_part_that_selects_trees_by_content_has_another_law():
    host = Sharing(game=TWO, budget=2, strict=False)
    with edited([SELECTIVE]):
        assert run(host, 4).law != expected(host, 4)


def test_parts_that_have_the_same_outcomes_miss():
    host = Sharing(game=replace(TWO, verify=coupled), budget=1)
    found = run(host, 4)
    with edited([Edit(DraftByBranches, "_shares", "Share(number, parts)", "Share()")]):
        same = run(host, 4)
    assert found.law == same.law == expected(host, 4)
    assert found.seen["miss"] < same.seen["miss"]
