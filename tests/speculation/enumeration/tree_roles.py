"""Roles over toy models whose proposals are token trees: see `host_roles` and `trees`.

A tree's shape is known before its tokens: it depends on the start alone, and on the forwards that
made it. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from ssd_jax.roles.records import (
    IDLE,
    BranchTokens,
    Drafted,
    Outcomes,
    Promotion,
    SlotOpening,
    no_branches,
)
from ssd_jax.testing.by_row import Promoted
from tests.speculation.enumeration import traversal
from tests.speculation.enumeration.chance import Key, Law
from tests.speculation.enumeration.filters import Model, Text
from tests.speculation.enumeration.host_roles import (
    Clock,
    Pending,
    Proposed,
    Token,
    ToyDraft,
    ToyTarget,
)
from tests.speculation.enumeration.rounds import Game, Record, State
from tests.speculation.enumeration.ssd import ranked
from tests.speculation.enumeration.trees import (
    MISSING,
    Tree,
    by_node,
    children,
    recursive,
    removed,
    without_replacement,
)

Shape = Callable[[int], tuple[int, ...]]
"""Parents of the nodes of a tree, which come by their depth, from its start."""


def depths(parents: Sequence[int]) -> list[int]:
    """Of each row."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


@dataclass(frozen=True)
class Drawing:
    """How a draft draws the tokens of its trees, and which outcomes it expects.

    Attributes:
      keyed_by_position: the noise of the position draws the target's token, too.
      by_noise: outcomes are ranked by the noise that draws the bonus token, else by the law alone.
      place: of a row's draws in the keys of a start; see `trees.Tree.draft_place`.
    """

    model: Model
    noise: Any
    keyed_by_position: bool
    by_noise: bool = True
    place: Callable[[int, int, int], int] = by_node

    def siblings(self, start: int, row: int, text: Text, count: int) -> list[int]:
        """The first children of a row, whose next token is behind `text`."""
        place = self.place(start, row, len(text) - 1 - start)
        key = Key(start, place, "draft")
        if self.keyed_by_position:
            key = Key(None, len(text), "token")
        return without_replacement(self.model(text), count, key, self.noise)

    def outcomes(self, start: int, text: Text, siblings: Sequence[int], count: int) -> list[int]:
        """Tokens that are none of the siblings, the first expected first."""
        law = self.model(text)
        for token in siblings:
            law = removed(law, token)
        key = Key(start, len(text), "bonus")
        if self.keyed_by_position:
            key = Key(None, len(text), "token")
        drawn = without_replacement(law, count, key, self.noise) if self.by_noise else []
        others = [t for t in ranked(law) if t not in (*drawn, *siblings)]
        return [*drawn, *others][:count]


class TreeSpeculation:
    """A tree of tokens that follows a text; each is drawn when somebody looks at it.

    Args:
      text: up to the pending token, whose position is `start`.
      parents: of the tree's nodes.
    """

    host, path, row = False, (), 0

    def __init__(
        self, start: int, text: Callable[[], Text], parents: Sequence[int], drawing: Drawing
    ) -> None:
        self.start, self.text, self.parents, self.drawing = start, text, tuple(parents), drawing
        self.tokens = [Token(partial(self._draw, node)) for node in range(len(parents))]

    def cut(self, count: int) -> None:
        """Keeps the first nodes."""
        self.tokens, self.parents = self.tokens[:count], self.parents[:count]

    def within(self, depth: int) -> int:
        """Number of nodes whose paths have at most so many tokens."""
        return sum(at <= depth for at in depths(self.parents)[1:])

    def way(self, row: int) -> list[int]:
        """The nodes on the path to a row."""
        return [*self.way(self.parents[row - 1]), row - 1] if row else []

    def words(self, row: int) -> list[Token]:
        """The tokens on the path to a row."""
        return [self.tokens[node] for node in self.way(row)]

    def text_at(self, row: int) -> Text | None:
        """The text up to a row; None if a token of its path is missing."""
        words = tuple(map(int, self.words(row)))
        return None if MISSING in words else (*self.text(), *words)

    def law_at(self, node: int) -> Law:
        """The law that a node was drawn from; none if it is missing."""
        text = self.text_at(self.parents[node])
        if text is None or int(self.tokens[node]) == MISSING:
            return ()
        return self.drawing.model(text)

    def _draw(self, node: int) -> int:
        row = self.parents[node]
        text = self.text_at(row)
        if text is None:
            return MISSING
        rank = children(self.parents, row).index(node)
        found = self.drawing.siblings(self.start, row, text, rank + 1)
        return found[rank] if len(found) > rank else MISSING


Order = Callable[[TreeSpeculation, TreeSpeculation], Any]
"""What the branches of a record are sorted by: the last ones are left out."""


def by_place(_record: TreeSpeculation, _branch: TreeSpeculation) -> int:
    """As they come: by rank, then by row."""
    return 0


def by_q(record: TreeSpeculation, branch: TreeSpeculation) -> float:
    """By the q of the nodes that were drawn: of those on the way, and of those left behind it."""
    way, chance = record.way(branch.row), Fraction(1)
    for node, parent in enumerate(record.parents):
        law = record.law_at(node)
        q = law[int(record.tokens[node])] if law else Fraction(0)
        chance *= q if node in way else 1 - q if parent == branch.row else 1
    return -chance


def by_proposal(_record: TreeSpeculation, branch: TreeSpeculation) -> int:
    """By what a branch would propose, which may not decide anything."""
    return int(branch.tokens[0])


class TreeDraft(ToyDraft):
    """A draft that branches off trees; see `ToyDraft`.

    Args:
      nodes: most of a tree.
      shape: of every tree.
      drawing: makes a `Drawing` from a model and noise.
      strict: whether it notices records that do not follow from the last ones.
      order: of the outcomes that it has branches for.
      settings: see `ToyDraft`; `width` is outcomes at each row that get a branch, as long as there
        are branches.
    """

    def __init__(
        self,
        model: Model,
        noise: Any,
        clock: Clock,
        *,
        nodes: int,
        shape: Shape,
        drawing: Callable[..., Drawing],
        strict: bool = True,
        order: Order = by_place,
        **settings: Any,
    ) -> None:
        super().__init__(model, noise, clock, **settings)
        self._strict, self._order = strict, order
        self.nodes, self._shape, self._drawing = nodes, shape, drawing
        self._promotion: Promotion | None = None

    def open(self, opening: SlotOpening) -> None:
        super().open(opening)
        self._records.pop(opening.slot, None)

    def promote(self, promotion: Promotion) -> None:
        self._promotion = promotion
        super().promote(promotion)

    def _renewed(self, moved: Promoted, text: Text) -> Any:
        promotion, before = self._promotion, self._records.get(moved.slot)
        assert promotion is not None
        if self._strict and before is not None and moved.committed:
            path = before.words(int(promotion.node[moved.slot]))
            tokens = text[before.start + 1 : -1]
            assert tuple(map(int, path)) == tokens, "the round ended elsewhere in its tree"
        parents = promotion.parents[moved.slot, : promotion.limit[moved.slot]].tolist()
        if moved.winner >= 0:
            won = self._winner(moved, text)
            record = self._speculation(moved.slot, moved.position, lambda: text)
            record.tokens, record.parents = won.tokens, won.parents
            record.cut(moved.limit)
            return record
        record = self._speculation(moved.slot, moved.position, lambda: text, parents)
        record.tokens, record.host = list(moved.tokens), True
        return record

    def _winner(self, moved: Promoted, text: Text) -> Any:
        if self._strict:
            return super()._winner(moved, text)
        return self._branches[moved.slot][moved.winner]

    def _speculation(
        self,
        slot: int,
        start: int,
        text: Callable[[], Text],
        parents: Sequence[int] | None = None,
    ) -> Any:
        noise = super()._speculation(slot, start, text).noise
        shape = self._shape(start) if parents is None else parents
        return TreeSpeculation(start, text, shape, self._drawing(self._model, noise))

    def _forks(
        self, slot: int, record: Any, counts: Sequence[int], first: Sequence[int]
    ) -> list[Any]:
        del first
        rows = enumerate(depths(record.parents))
        size = len(self._model(self._texts[slot]))
        number, parts = self.share
        places = [
            (rank, row)
            for row, depth in rows
            if depth < len(counts) and counts[depth]
            for rank in range(min(self._width, size - len(children(record.parents, row))))
            if (row + rank) % parts == number
        ]
        branches = [self._outcome(slot, record, row, rank) for rank, row in sorted(places)]
        return sorted(branches, key=partial(self._order, record))[: max(counts)]

    def _outcome(self, slot: int, record: TreeSpeculation, row: int, rank: int) -> TreeSpeculation:
        """The branch of an outcome behind a row."""
        text = self._texts[slot]
        nodes = children(record.parents, row)

        def bonus() -> int:
            at = record.text_at(row)
            if at is None:
                return MISSING
            there = [int(record.tokens[node]) for node in nodes]
            found = record.drawing.outcomes(record.start, at, there, rank + 1)
            return found[rank] if len(found) > rank else MISSING

        path = [*record.words(row), Token(bonus)]
        branch = self._speculation(slot, record.start + len(path), lambda: (*text, *map(int, path)))
        branch.path, branch.row = path, row
        return branch

    def _branch_tokens(self, made: int) -> BranchTokens:
        empty = no_branches(self.slots, self.branches, self.k, made, self.nodes)
        shape = empty.bonus.shape
        bonus, tokens = np.full(shape, -1, object), np.zeros((*shape, self.nodes), object)
        assert empty.trees is not None
        for slot in self._records:
            for place, branch in enumerate(self._branches.get(slot, ())):
                count = branch.within(min(made, self.k))
                bonus[slot, place], empty.lengths[slot, place] = branch.path[-1], count
                tokens[slot, place, :count] = branch.tokens[:count]
                empty.trees.node[slot, place] = branch.row
                empty.trees.parents[slot, place, :count] = branch.parents[:count]
        return empty._replace(bonus=bonus, tokens=tokens)


class TreePending(Pending):
    """Outcomes of trees."""

    def __init__(
        self, clock: Clock, moment: float, emitted: dict[int, Text], node: dict[int, int]
    ) -> None:
        super().__init__(clock, moment, emitted)
        self._node = node

    def read(self) -> Outcomes:
        found = super().read()
        node = np.zeros_like(found.accepted)
        for row, at in self._node.items():
            node[row] = at
        return found._replace(node=node)


@dataclass(frozen=True)
class Verified:
    """What a target judges: tokens and parents that it was told, and the laws of the proposal."""

    tokens: Text
    parents: tuple[int, ...]
    laws: tuple[Law, ...]

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return max(depths(self.parents))


Judge = Callable[[Game, Text, Verified, Any], Text]


def by_position(game: Game, text: Text, tree: Verified, noise: Any) -> Text:
    """The coupled rule."""
    row: int | None = 0
    while row is not None:
        drawn = noise.token(game.target(text), Key(None, len(text), "token"))
        text = (*text, drawn)
        row = _child(tree, row, drawn)
    return text


def recursively(game: Game, text: Text, tree: Verified, noise: Any) -> Text:
    """Recursive rejection."""
    judge = Tree(parents=tree.parents, siblings=without_replacement, rejected=recursive)
    return judge.verify(game, State(text), Record(tree.tokens, tree.laws), noise)


def from_leaves(game: Game, text: Text, tree: Verified, noise: Any) -> Text:
    """Traversal verification."""
    judge = replace(traversal.PLAIN, parents=tree.parents)
    return judge.verify(game, State(text), Record(tree.tokens, tree.laws), noise)


def _child(tree: Verified, row: int, token: int) -> int | None:
    """The row behind a child that is a token."""
    nodes = (node for node in children(tree.parents, row) if tree.tokens[node] == token)
    return next((node + 1 for node in nodes), None)


class TreeTarget(ToyTarget):
    """Verifies trees by the game's rule; see `ToyTarget`."""

    def __init__(self, *args: Any, judge: Judge, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._judge = judge
        self.trees: list[tuple[Verified, int]] = []
        """Verified trees, and how many of their tokens were accepted."""

    def accept(
        self,
        logits: tuple[np.ndarray, np.ndarray, Drafted | None],
        proposal: dict[int, Proposed] | None = None,
    ) -> TreePending:
        (tokens, lengths, drafted), proposal = logits, proposal or {}
        emitted, node = {}, {}
        for slot in np.flatnonzero(lengths != IDLE).tolist():
            text = self._texts[slot] = self._texts[slot][: lengths[slot] + 1]
            assert (len(text), text[-1]) == (lengths[slot] + 1, tokens[slot])
            tree = Verified((), (), ())
            if slot in proposal and drafted is not None:
                count = proposal[slot].length
                parents = tuple(drafted.parents[slot, :count].tolist())
                assert drafted.lengths[slot] == max(depths(parents))
                tree = Verified(
                    tuple(map(int, drafted.tokens[slot, :count])),
                    parents,
                    tuple(proposal[slot].laws),
                )
            after = self._texts[slot] = self._judge(self._game, text, tree, self._noise_of(slot))
            emitted[slot], row = after[len(text) :], 0
            for token in emitted[slot][:-1]:
                row = _child(tree, row, token)
                assert row is not None
            node[slot] = row
            self.lengths.append((self._names[slot], len(tree.tokens)))
            self.trees.append((tree, len(emitted[slot]) - 1))
        return TreePending(self._clock, self._clock.now + 1, emitted, node)
