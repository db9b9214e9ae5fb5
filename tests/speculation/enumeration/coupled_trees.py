"""Token trees under the coupled rule in rationals, beside decoding one by one with the same noise.

Written from the definitions, not from the engine's code. Row 0 is the pending token, row i + 1 node
i. The noise of a position ranks the draft's continuations of every node there, as it draws the
target's token; greedy runs do without noise. Nothing here imports JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tests.speculation.enumeration.chance import Chance, Key, Law, one_object
from tests.speculation.enumeration.filters import Model, Text, normalised, support
from tests.speculation.enumeration.rounds import State
from tests.speculation.enumeration.trees import children


class Tree(NamedTuple):
    """The nodes of a proposal: the token of each, and the row of its parent."""

    tokens: Text = ()
    parents: tuple[int, ...] = ()

    def path(self, row: int) -> tuple[int, ...]:
        """The nodes from the pending token to a row, its own last."""
        return () if row == 0 else (*self.path(self.parents[row - 1]), row - 1)

    def tokens_to(self, row: int) -> Text:
        """The tokens on the path to a row."""
        return tuple(self.tokens[node] for node in self.path(row))


def by_depth(text: Text, tree: Tree, row: int) -> int:
    """The position that a row's next token has."""
    return len(text) + len(tree.path(row))


def along_the_path(text: Text, tree: Tree, row: int) -> Text:
    """The text before a row's next token."""
    return text + tree.tokens_to(row)


def all_copied(_tree: Tree, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """The pages keep the accepted nodes."""
    return nodes


@dataclass(frozen=True, kw_only=True)
class Trees:
    """Rounds that verify trees of tokens.

    Attributes:
      target, draft: the next token's law.
      depth: most tokens of a path.
      children: how many of a node's continuations are proposed, from the state of the round, the
        tokens on the path to the node, and the likeliest one.
      penalty: a law, given the tokens before.
      greedy: whether the likeliest token is emitted, and no noise is drawn.
      place, counted: of a row: the position of the noise that draws its token, and the text that
        penalties count.
      parents: those that the judge takes a tree to have.
      copied: of a tree and the accepted nodes: those whose keys and values the pages keep.
      emits: of a tree and the tokens that a round emits: those that the text gets.
    """

    target: Model
    draft: Model
    depth: int
    children: Callable[[State, Text, int], int]
    penalty: Callable[[Law, Text], Law] = lambda law, _text: law
    greedy: bool = False
    place: Callable[[Text, Tree, int], int] = by_depth
    counted: Callable[[Text, Tree, int], Text] = along_the_path
    parents: Callable[[Tree], tuple[int, ...]] = lambda tree: tree.parents
    copied: Callable[[Tree, tuple[int, ...]], tuple[int, ...]] = all_copied
    emits: Callable[[Tree, Text], Text] = lambda _tree, emitted: emitted

    def round(self, state: State, chance: Chance) -> State:
        """One round; the state's cache is the text that the target's pages hold."""
        return self.verify(state, self.propose(state, chance), chance)

    def propose(self, state: State, chance: Chance) -> Tree:
        """Breadth first; a node's children are its best continuations."""
        tree, rows = Tree(), [()]
        for row, path in enumerate(rows):
            if len(path) == self.depth:
                continue
            best = Ranking(self, state.text + path, chance)
            for rank in range(self.children(state, path, best[0])):
                token = best[rank]
                if token is None:
                    break
                tree = Tree((*tree.tokens, token), (*tree.parents, row))
                rows.append((*path, token))
        return tree

    def verify(self, state: State, tree: Tree, chance: Chance) -> State:
        """Walks to the child that is the target's token as long as there is one, and a step on."""
        text, held, parents = state.text, state.cache or state.text, self.parents(tree)
        row, nodes, emitted = 0, (), ()
        while row is not None:
            law = self.penalty(
                self.target(held + tree.tokens_to(row)), self.counted(text, tree, row)
            )
            token = self.drawn(law, self.place(text, tree, row), chance)
            emitted = (*emitted, token)
            behind = children(parents, row)
            node = next((node for node in behind if tree.tokens[node] == token), None)
            nodes, row = (nodes, None) if node is None else ((*nodes, node), node + 1)
        accepted = tuple(tree.tokens[node] for node in self.copied(tree, nodes))
        held = held + accepted + emitted[len(accepted) :]
        return State(text + self.emits(tree, emitted), state.round + 1, held)

    def drawn(self, law: Law, position: int, chance: Chance) -> int:
        """The target's token at a position."""
        return chance.token(support(law, 1) if self.greedy else law, Key(None, position, "token"))

    def one_by_one(self, text: Text, count: int, chance: Chance) -> Text:
        """A text with `count` tokens more, without proposals."""
        for _ in range(count):
            law = self.penalty(self.target(text), text)
            text = (*text, self.drawn(law, len(text), chance))
        return text


class Ranking:
    """A draft's continuations of a text, best first; each is drawn when it is asked for."""

    def __init__(self, trees: Trees, text: Text, chance: Chance) -> None:
        self._law = trees.penalty(trees.draft(text), text)
        self._greedy, self._chance, self._best = trees.greedy, chance, []
        self._key = Key(None, len(text), "token")

    def __getitem__(self, rank: int) -> int | None:
        """The continuation of a rank; None where no more are possible."""
        while len(self._best) <= rank:
            law = without(self._law, frozenset(self._best), self._greedy)
            if law is None:
                return None
            self._best.append(self._chance.token(law, self._key))
        return self._best[rank]


@functools.cache
def without(law: Law, tokens: frozenset[int], greedy: bool) -> Law | None:
    """A law of the tokens but these, or of the likeliest of them; None where there are none."""
    left = [p * (token not in tokens) for token, p in enumerate(law)]
    if not any(left):
        return None
    return one_object(support(normalised(left), 1) if greedy else normalised(left))
