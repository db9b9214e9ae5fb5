"""Flawed trees, each beside the tree it spoils. Nothing here imports JAX.

Draft noise that all nodes of a depth share keeps the law of a fixed shape: a path has one node of
each depth. It does not where a branch is cut by what another one drew, which noise of each node's
own allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from tests.speculation.enumeration.chance import Chance, Key, Law
from tests.speculation.enumeration.filters import Text
from tests.speculation.enumeration.toys import iid
from tests.speculation.enumeration.trees import Tree, recursive, removed, without_replacement

TARGET, DRAFT = iid(4, 4, 2), iid(1, 3, 6)
PLAIN = Tree(parents=(0, 0, 1, 1), siblings=without_replacement, rejected=recursive)
WIDE = replace(PLAIN, parents=(0, 0, 1, 1, 2, 2))


@dataclass(frozen=True, kw_only=True)
class TreeFlaw:
    """A tree with a fault, and what it spoils."""

    wrong: Tree
    right: Tree = PLAIN


def by_depth(start: int, _node: int, depth: int) -> int:
    """The position that all nodes of a depth share."""
    return start + 1 + depth


def _with_replacement(law: Law, count: int, key: Key, chance: Chance) -> list[int]:
    keys = [key._replace(position=key.position + 100 * index) for index in range(count)]
    return [chance.token(law, key) for key in keys]


def _not_renormalised(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    left = tuple(max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True))
    return (left if any(left) else p), recursive(p, q, token)[1]


def _q_not_renormalised(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    return recursive(p, q, token)[0], removed(q, token)


def _unless_a_0(tokens: Text) -> list[bool]:
    """The second child of the pending token is dropped if it turned out to be a 0."""
    return [node != 1 or token != 0 for node, token in enumerate(tokens)]


def _sorted(law: Law, count: int, key: Key, chance: Chance) -> list[int]:
    """The likeliest of the drawn siblings first."""
    return sorted(without_replacement(law, count, key, chance), key=lambda token: -law[token])


def _cut_by_another_branch(tokens: Text) -> list[bool]:
    """The second child has children only if the first child's first one is a 0."""
    return [node < 4 or tokens[2] == 0 for node in range(len(tokens))]


CUT = replace(WIDE, judged=_cut_by_another_branch)

FLAWS: Mapping[str, TreeFlaw] = {
    "draft noise by depth, and a branch cut by what another drew": TreeFlaw(
        right=CUT, wrong=replace(CUT, draft_place=by_depth)
    ),
    "one uniform for all siblings": TreeFlaw(wrong=replace(PLAIN, accept_place=by_depth)),
    "siblings with replacement, judged without": TreeFlaw(
        wrong=replace(PLAIN, siblings=_with_replacement)
    ),
    "a residual that is not renormalised": TreeFlaw(
        wrong=replace(PLAIN, rejected=_not_renormalised)
    ),
    "a q that is not renormalised": TreeFlaw(wrong=replace(PLAIN, rejected=_q_not_renormalised)),
    "a child removed after it was sampled": TreeFlaw(wrong=replace(PLAIN, judged=_unless_a_0)),
    "siblings sorted after they were sampled": TreeFlaw(wrong=replace(PLAIN, siblings=_sorted)),
    "a wrong parent": TreeFlaw(wrong=replace(PLAIN, order=(0, 0, 0, 1))),
}
BY_DEPTH = replace(WIDE, draft_place=by_depth)
