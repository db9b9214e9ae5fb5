"""Rounds that judge token trees by recursive rejection emit exactly the target's law."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.speculation.enumeration import filters, toys
from tests.speculation.enumeration.chance import paths
from tests.speculation.enumeration.filters import Text, support, then
from tests.speculation.enumeration.laws import autoregressive, emitted
from tests.speculation.enumeration.rounds import Game, State
from tests.speculation.enumeration.toys import PROMPT
from tests.speculation.enumeration.tree_flaws import BY_DEPTH, DRAFT, FLAWS, PLAIN, TARGET, WIDE
from tests.speculation.enumeration.trees import Tree

SHAPES = {
    "a chain": (0, 1, 2),
    "three siblings": (0, 0, 0),
    "two by two": (0, 0, 1, 1, 2, 2),
    "two, then a chain": (0, 0, 1, 3),
    "behind the second": (0, 0, 2, 2),
    "depth three": (0, 0, 1, 1, 3, 3),
}
DRAFTS = {
    "dense": toys.DENSE3,
    "zeros": toys.DRAFT3,
    "the target itself": toys.TARGET3,
    "two ids": then(toys.DENSE3, lambda law: support(law, 2)),
    "greedy": then(toys.DENSE3, lambda law: support(law, 1)),
}


def law_of(game: Game, tree: Tree, count: int) -> dict[Text, Fraction]:
    """The law of the first tokens that rounds of these trees emit."""
    return emitted(tree.game(game).round, PROMPT, count)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_trees_of_any_shape_keep_the_law(parents, draft):
    game = Game(target=toys.TARGET3, draft=draft, k=3)
    assert law_of(game, replace(PLAIN, parents=parents), 3) == autoregressive(
        toys.TARGET3, PROMPT, 3
    )


def test_truncation_and_penalties_along_the_path_keep_the_law():
    target = filters.presence(toys.TARGET3, Fraction(1, 4))
    target = then(target, lambda law: filters.top_p(law, Fraction(9, 10)))
    assert law_of(Game(target=target, draft=toys.DENSE3, k=2), WIDE, 3) == autoregressive(
        target, PROMPT, 3
    )


@pytest.mark.parametrize("flaw", FLAWS.values(), ids=FLAWS)
def test_every_flaw_of_a_tree_changes_the_law_and_its_absence_does_not(flaw):
    game = Game(target=TARGET, draft=DRAFT, k=2)
    expected = autoregressive(TARGET, PROMPT, 2)
    assert law_of(game, flaw.right, 2) == expected
    assert law_of(game, flaw.wrong, 2) != expected


def test_draft_noise_by_depth_goes_unnoticed_in_a_fixed_shape():
    game = Game(target=toys.TARGET3, draft=toys.DENSE3, k=2)
    assert law_of(game, BY_DEPTH, 3) == autoregressive(toys.TARGET3, PROMPT, 3)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_tree_that_is_a_chain_ends_as_the_chain_does_under_the_ratio_rule(draft):
    game = Game(target=toys.TARGET3, draft=draft, k=3)

    def rounds(one: Game) -> dict[Text, Fraction]:
        found: dict[Text, Fraction] = defaultdict(Fraction)
        for state, _, mass in paths(
            lambda chance: one.round(State(PROMPT), chance), frozenset(), lambda _: True
        ):
            found[state.text] += mass
        return found

    assert rounds(replace(PLAIN, parents=(0, 1, 2)).game(game)) == rounds(game)
