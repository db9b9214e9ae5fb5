"""Rounds that judge token trees from the root or from the leaves emit exactly the target's law."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.speculation.enumeration import filters, toys, traversal
from tests.speculation.enumeration.chance import paths
from tests.speculation.enumeration.filters import Text, support, then
from tests.speculation.enumeration.laws import autoregressive, emitted
from tests.speculation.enumeration.rounds import Game, State, block, ratio
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


JUDGED = pytest.mark.parametrize("plain", [PLAIN, traversal.PLAIN], ids=["recursive", "traversal"])


@JUDGED
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_trees_of_any_shape_keep_the_law(parents, draft, plain):
    game = Game(target=toys.TARGET3, draft=draft, k=3)
    assert law_of(game, replace(plain, parents=parents), 3) == autoregressive(
        toys.TARGET3, PROMPT, 3
    )


@JUDGED
def test_truncation_and_penalties_along_the_path_keep_the_law(plain):
    target = filters.presence(toys.TARGET3, Fraction(1, 4))
    target = then(target, lambda law: filters.top_p(law, Fraction(9, 10)))
    assert law_of(
        Game(target=target, draft=toys.DENSE3, k=2), replace(plain, parents=WIDE.parents), 3
    ) == autoregressive(target, PROMPT, 3)


EVERY_FLAW = FLAWS | {f"traversal: {name}": flaw for name, flaw in traversal.FLAWS.items()}


@pytest.mark.parametrize("flaw", EVERY_FLAW.values(), ids=EVERY_FLAW)
def test_every_flaw_of_a_tree_changes_the_law_and_its_absence_does_not(flaw):
    game = Game(target=TARGET, draft=DRAFT, k=2)
    expected = autoregressive(TARGET, PROMPT, 2)
    assert law_of(game, flaw.right, 2) == expected
    assert law_of(game, flaw.wrong, 2) != expected


def test_draft_noise_by_depth_goes_unnoticed_in_a_fixed_shape():
    game = Game(target=toys.TARGET3, draft=toys.DENSE3, k=2)
    assert law_of(game, BY_DEPTH, 3) == autoregressive(toys.TARGET3, PROMPT, 3)


@pytest.mark.parametrize(("plain", "rule"), [(PLAIN, ratio), (traversal.PLAIN, block)])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_tree_that_is_a_chain_ends_as_the_chain_does(draft, plain, rule):
    game = Game(target=toys.TARGET3, draft=draft, k=3, verify=rule)

    def rounds(one: Game) -> dict[Text, Fraction]:
        found: dict[Text, Fraction] = defaultdict(Fraction)
        for state, _, mass in paths(
            lambda chance: one.round(State(PROMPT), chance), frozenset(), lambda _: True
        ):
            found[state.text] += mass
        return found

    assert rounds(replace(plain, parents=(0, 1, 2)).game(game)) == rounds(game)


@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_from_the_leaves_on_as_many_tokens_are_accepted_as_from_the_root(parents):
    game = Game(target=toys.TARGET3, draft=toys.DENSE3, k=3)

    def accepted(plain: Tree) -> Fraction:
        one = replace(plain, parents=parents).game(game)
        return sum(
            mass * (len(state.text) - len(PROMPT) - 1)
            for state, _, mass in paths(
                lambda chance: one.round(State(PROMPT), chance), frozenset(), lambda _: True
            )
        )

    assert accepted(traversal.PLAIN) >= accepted(PLAIN)
