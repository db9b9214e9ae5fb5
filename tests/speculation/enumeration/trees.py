"""Token trees in rationals: siblings without replacement, judged by recursive rejection.

Written from the definitions, not from the engine's code. Row 0 is the pending token, row i + 1 node
i; `parents` has the row of each node's parent, and siblings come in the order in which they are
drawn. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.speculation.enumeration.chance import Chance, Key, Law
from tests.speculation.enumeration.filters import Text, normalised
from tests.speculation.enumeration.rounds import Game, Record, State, residual

MISSING = -1
"""Token of a node that does not exist: q had no more siblings, or there is no parent."""


def by_node(start: int, node: int, _depth: int) -> int:
    """Where in a round's keys a draw is: each node has noise of its own."""
    return start + 1 + node


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Trees of one shape, and how a round proposes and judges them.

    Attributes:
      parents: of the nodes.
      siblings: draws so many tokens, in order, from a law by one key.
      draft_place, accept_place: of a draw in the keys, from start, node (or row), and depth.
      judged: which of the proposed nodes are judged.
      rejected: what is left of (p, q) after a token of q was rejected.
      order: the parents that the judge takes the nodes to have.
    """

    parents: tuple[int, ...]
    siblings: Callable[[Law, int, Key, Chance], list[int]]
    draft_place: Callable[[int, int, int], int] = by_node
    accept_place: Callable[[int, int, int], int] = by_node
    judged: Callable[[Text], Sequence[bool]] = lambda tokens: [True] * len(tokens)
    rejected: Callable[[Law, Law, int], tuple[Law, Law]]
    order: tuple[int, ...] | None = None

    def propose(self, game: Game, state: State, chance: Chance) -> Record:
        """Draws the nodes of every row; a record's laws are those that the nodes came from."""
        start, texts = len(state.text) - 1, {0: state.text}
        tokens, laws = [MISSING] * len(self.parents), [()] * len(self.parents)
        for row in range(len(self.parents) + 1):
            nodes = children(self.parents, row)
            if row not in texts or not nodes:
                continue
            law = game.proposal(game, start, texts[row], chance)
            depth = len(texts[row]) - len(state.text)
            key = Key(start, self.draft_place(start, row, depth), "draft")
            for node, token in zip(
                nodes, self.siblings(law, len(nodes), key, chance), strict=False
            ):
                tokens[node], laws[node] = token, law
                texts[node + 1] = (*texts[row], token)
        return Record(tuple(tokens), tuple(laws))

    def verify(self, game: Game, state: State, record: Record, chance: Chance) -> Text:
        """Recursive rejection from the root down; the bonus is from what is left of p."""
        start, text, row = len(state.text) - 1, state.text, 0
        parents, judged = self.order or self.parents, self.judged(record.tokens)
        while True:
            p, q, taken = game.target(text), None, None
            for node in children(parents, row):
                token = record.tokens[node]
                if token == MISSING or not judged[node]:
                    continue
                q = record.laws[node] if q is None else q
                place = self.accept_place(start, node, len(text) - len(state.text))
                odds = p[token] / q[token] if q[token] else Fraction(0)
                if chance.below(odds, Key(start, place, "accept")):
                    taken = node
                    break
                p, q = self.rejected(p, q, token)
            if taken is None:
                return (*text, chance.token(normalised(p), Key(start, len(text), "bonus")))
            row, text = taken + 1, (*text, record.tokens[taken])

    def game(self, game: Game) -> Game:
        """A game whose rounds propose and judge these trees."""
        return Game(
            target=game.target,
            draft=game.draft,
            k=game.k,
            proposal=game.proposal,
            propose=self.propose,
            verify=self.verify,
        )


def children(parents: tuple[int, ...], row: int) -> list[int]:
    """The nodes behind a row, in order."""
    return [node for node, parent in enumerate(parents) if parent == row]


def without_replacement(law: Law, count: int, key: Key, chance: Chance) -> list[int]:
    """The tokens that the noise of a key draws one after the other, as long as q has any."""
    tokens: list[int] = []
    while len(tokens) < count and any(law):
        tokens.append(chance.token(normalised(law), key))
        law = removed(law, tokens[-1])
    return tokens


def removed(law: Law, token: int) -> Law:
    """The law without a token, not normalised."""
    return tuple(Fraction(0) if v == token else mass for v, mass in enumerate(law))


def recursive(p: Law, q: Law, token: int) -> tuple[Law, Law]:
    """max(p - q, 0) and q without the token, both normalised; an empty q is all zeros."""
    rest = removed(q, token)
    return residual(p, q), normalised(rest) if any(rest) else rest
