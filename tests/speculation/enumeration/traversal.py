"""Traversal verification of token trees in rationals: from the leaves to the root.

Written from the definition (Weng et al., arXiv 2505.12398), not from the engine's code. Nothing
here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

from tests.speculation.enumeration.chance import Chance, Key, Law
from tests.speculation.enumeration.filters import Text, normalised
from tests.speculation.enumeration.rounds import Game, Record, State
from tests.speculation.enumeration.tree_flaws import TreeFlaw, by_depth
from tests.speculation.enumeration.trees import (
    MISSING,
    Tree,
    children,
    recursive,
    removed,
    without_replacement,
)


class Left(NamedTuple):
    """What is left at a row: p, q, and the chance that a text comes through it."""

    p: Law
    q: Law
    survival: Fraction


def survival(left: Left, token: int) -> Fraction:
    """The chance that a text comes through a child."""
    odds = left.p[token] / left.q[token] if left.q[token] else Fraction(0)
    return min(left.survival * odds, Fraction(1))


def without(left: Left, token: int) -> Left:
    """What is left behind a row after a child was rejected."""
    chance, rest = left.survival, removed(left.q, token)
    surplus = tuple(max(chance * a - b, Fraction(0)) for a, b in zip(left.p, left.q, strict=True))
    total = sum(surplus, Fraction(0))
    return Left(
        normalised(surplus) if total else left.p,
        normalised(rest) if any(rest) else rest,
        total / (total + 1 - chance) if chance < 1 else chance,
    )


def in_order(nodes: Sequence[int], _tokens: Text) -> list[int]:
    """The children of a row as they come."""
    return list(nodes)


@dataclass(frozen=True, kw_only=True)
class Traversal(Tree):
    """Trees that are judged from their leaves on.

    Attributes:
      survives: the chance that a text comes through a child.
      without: what is left behind a row after a child was rejected.
      sequence: in which the children of a row are judged.
    """

    survives: Callable[[Left, int], Fraction] = survival
    without: Callable[[Left, int], Left] = without
    sequence: Callable[[Sequence[int], Text], list[int]] = in_order

    def verify(self, game: Game, state: State, record: Record, chance: Chance) -> Text:
        """The first leaf is judged; where it is rejected, the tree goes on without it."""
        start, parents = len(state.text) - 1, self.order or self.parents
        judged, texts, path = self.judged(record.tokens), {0: state.text}, [0]
        behind: dict[int, list[int]] = {}
        left: dict[int, Left] = {}

        def enter(row: int, arrives: Fraction) -> None:
            nodes = self.sequence(children(parents, row), record.tokens)
            there = [node for node in nodes if record.tokens[node] != MISSING and judged[node]]
            q = record.laws[there[0]] if there else ()
            behind[row], left[row] = there, Left(game.target(texts[row]), q, arrives)

        enter(0, Fraction(1))
        while True:
            row = path[-1]
            if behind[row]:
                node = behind[row][0]
                token = record.tokens[node]
                texts[node + 1] = (*texts[row], token)
                enter(node + 1, self.survives(left[row], token))
                path.append(node + 1)
                continue
            text, depth = texts[row], len(path) - 2
            place = self.accept_place(start, row - 1, depth)
            if row == 0 or chance.below(left[row].survival, Key(start, place, "accept")):
                return (
                    *text,
                    chance.token(normalised(left[row].p), Key(start, len(text), "bonus")),
                )
            path.pop()
            node = behind[path[-1]].pop(0)
            left[path[-1]] = self.without(left[path[-1]], record.tokens[node])


PLAIN = Traversal(parents=(0, 0, 1, 1), siblings=without_replacement, rejected=recursive)


def _uncapped(left: Left, token: int) -> Fraction:
    return left.survival * left.p[token] / left.q[token] if left.q[token] else Fraction(0)


def _from_p(left: Left, token: int) -> Left:
    """The residual of p, not of the share of p that comes here."""
    return without(left._replace(survival=Fraction(1)), token)._replace(
        survival=without(left, token).survival
    )


def _as_before(left: Left, token: int) -> Left:
    return without(left, token)._replace(survival=left.survival)


def _with_replacement(left: Left, token: int) -> Left:
    return without(left, token)._replace(q=left.q)


def _zeros_last(nodes: Sequence[int], tokens: Text) -> list[int]:
    return sorted(nodes, key=lambda node: tokens[node] == 0)


FLAWS: Mapping[str, TreeFlaw] = {
    "the product of odds without a cap": TreeFlaw(
        right=PLAIN, wrong=replace(PLAIN, survives=_uncapped)
    ),
    "the residual of the whole p": TreeFlaw(right=PLAIN, wrong=replace(PLAIN, without=_from_p)),
    "a row that survives as before": TreeFlaw(
        right=PLAIN, wrong=replace(PLAIN, without=_as_before)
    ),
    "a rejected token left in q": TreeFlaw(
        right=PLAIN, wrong=replace(PLAIN, without=_with_replacement)
    ),
    "one uniform for all nodes of a depth": TreeFlaw(
        right=PLAIN, wrong=replace(PLAIN, accept_place=by_depth)
    ),
    "siblings judged in an order of what was drawn": TreeFlaw(
        right=PLAIN, wrong=replace(PLAIN, sequence=_zeros_last)
    ),
    "a wrong parent": TreeFlaw(right=PLAIN, wrong=replace(PLAIN, order=(0, 0, 0, 1))),
}
