"""Rounds of token trees under the coupled rule say what decoding one by one says, always."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.selection import cases
from tests.speculation.enumeration import filters, toys
from tests.speculation.enumeration.chance import Chance, Law
from tests.speculation.enumeration.coupled_trees import Tree, Trees
from tests.speculation.enumeration.filters import Model, Text, point, then
from tests.speculation.enumeration.laws import autoregressive, emitted
from tests.speculation.enumeration.rounds import State
from tests.speculation.enumeration.toys import PROMPT

Children = Callable[[State, Text, int], int]
EOS = 2


def by_level(*counts: int) -> Children:
    """So many children of every node of a depth."""
    return lambda _state, path, _best: counts[len(path)]


def behind_the_likeliest(_state: State, path: Text, best: int) -> int:
    """Two children of the pending token, and a chain behind a 1."""
    return 2 if not path else int(path[0] == 1)


def by_the_noise(_state: State, path: Text, best: int) -> int:
    """As many children as the token that the noise favours says."""
    return best + 1 if not path else int(best != path[-1])


def by_the_output(state: State, path: Text, _best: int) -> int:
    """A chain or siblings, by the tokens and the rounds before."""
    return 1 + (state.text.count(1) + state.round) % 2


SHAPES = {
    "two by two": (2, by_level(2, 2)),
    "three siblings, then a chain": (2, by_level(3, 1)),
    "a chain beside a leaf": (3, behind_the_likeliest),
    "depth three": (3, by_level(2, 1, 1)),
    "chosen after seeing the noise": (2, by_the_noise),
    "chosen by the output": (2, by_the_output),
    "nothing": (1, by_level(0)),
}
DRAFTS = {
    "dense": toys.DENSE3,
    "zeros": toys.DRAFT3,
    "ties": toys.TIES3,
    "the target itself": toys.TARGET3,
    "two ids": then(toys.DENSE3, lambda law: filters.support(law, 2)),
    "n-gram": toys.repeats(3),
}


def trees(shape: str = "two by two", **settings) -> Trees:
    depth, children = SHAPES[shape]
    defaults = {"target": toys.TARGET3, "draft": toys.DENSE3}
    return Trees(depth=depth, children=children, **defaults | settings)


TWO_IDS = {"target": toys.TARGET2, "draft": toys.DRAFT2}
FEW = trees(draft=DRAFTS["two ids"])
TWO = trees("a chain beside a leaf", **TWO_IDS)


def law_beside_one_by_one(run: Trees, count: int) -> tuple[dict[Text, Fraction], bool]:
    """The law of the first tokens, and whether a round may end otherwise than without proposals."""
    differs = False

    def step(state: State, chance: Chance) -> State:
        nonlocal differs
        after = run.round(state, chance)
        count = len(after.text) - len(state.text)
        differs |= after.text != run.one_by_one(state.text, count, chance)
        return after

    return emitted(step, PROMPT, count), differs


def assert_same(run: Trees, count: int = 3) -> None:
    law, differs = law_beside_one_by_one(run, count)
    assert not differs
    target = run.target
    if run.greedy:
        target = then(target, lambda law: filters.support(law, 1))
    assert law == autoregressive(lambda text: run.penalty(target(text), text), PROMPT, count)


PAIRS = [(shape, draft) for shape in SHAPES for draft in DRAFTS]
QUICK = [
    ("three siblings, then a chain", "dense"),
    ("chosen after seeing the noise", "zeros"),
    ("chosen by the output", "zeros"),
    ("a chain beside a leaf", "two ids"),
    ("two by two", "two ids"),
    ("two by two", "n-gram"),
    ("nothing", "dense"),
]


@pytest.mark.parametrize(("shape", "draft"), cases(PAIRS, *QUICK))
def test_sampled_rounds_of_any_tree_say_what_decoding_one_by_one_says(shape, draft):
    assert_same(trees(shape, draft=DRAFTS[draft]))


@pytest.mark.parametrize("shape", ["two by two", "depth three", "a chain beside a leaf"])
def test_four_tokens_of_two_ids_are_those_of_decoding_one_by_one(shape):
    assert_same(trees(shape, **TWO_IDS), 4)


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", [toys.TARGET3, toys.TIES3, toys.DENSE3])
def test_greedy_rounds_of_any_tree_say_what_decoding_one_by_one_says(shape, draft, target):
    assert_same(trees(shape, draft=draft, target=target, greedy=True), 6)


def test_truncation_and_penalties_along_the_path_keep_the_text():
    target = then(toys.TARGET3, lambda law: filters.top_p(law, Fraction(9, 10)))
    assert_same(replace(FEW, target=target, penalty=presence))


def presence(law: Law, text: Text) -> Law:
    return filters.presence(lambda _text: law, Fraction(1, 4))(text)


def ending(model: Model) -> Model:
    """A text that has ended says nothing but its end."""
    return lambda text: point(EOS, 3) if EOS in text[1:] else model(text)


def by_node(text: Text, _tree: Tree, row: int) -> int:
    return len(text) + row


def along_the_rows(text: Text, tree: Tree, row: int) -> Text:
    """As many of the tree's first tokens as the path to the row has."""
    return text + tree.tokens[: len(tree.path(row))]


def shifted(tree: Tree) -> tuple[int, ...]:
    """Each node behind the parent of the node before it."""
    return (0, *tree.parents[:-1]) if tree.parents else ()


def first_of_each_depth(tree: Tree, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """In place of each accepted node the first one that has its depth."""
    depths = [len(tree.path(node + 1)) for node in range(len(tree.tokens))]
    return tuple(depths.index(depth + 1) for depth in range(len(nodes)))


def until_a_node_that_ends(tree: Tree, emitted: Text) -> Text:
    """The text ends if any node would end it."""
    return (*emitted, EOS) if EOS in tree.tokens and EOS not in emitted else emitted


FLAWS = {
    "noise by node in place of depth": (FEW, {"place": by_node}),
    "a wrong parent": (FEW, {"parents": shifted}),
    "keys and values of a sibling left in the path": (TWO, {"copied": first_of_each_depth}),
    "penalties along the rows": (replace(FEW, penalty=presence), {"counted": along_the_rows}),
    "an end inside one path ends others": (
        replace(FEW, target=ending(toys.TARGET3)),
        {"emits": until_a_node_that_ends},
    ),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_every_flaw_of_a_tree_changes_the_law_and_its_absence_does_not(flaw):
    right, fault = FLAWS[flaw]
    assert_same(right)
    law, differs = law_beside_one_by_one(replace(right, **fault), 3)
    assert differs
    assert law != law_beside_one_by_one(right, 3)[0]
