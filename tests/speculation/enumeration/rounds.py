"""Speculative decoding in rationals: propose, verify, one round after the other.

Written from the definitions, not from the engine's code. A `Game` is one configuration; its parts
are fields, so that a flaw, or a richer kind of speculation, replaces one of them. Nothing here
imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tests.speculation.enumeration.chance import Chance, Key, Law
from tests.speculation.enumeration.filters import Model, Text, normalised, point


class State(NamedTuple):
    """Between rounds: the committed text (its last token is pending) and the round's number.

    Speculation that outlives a round (a cache) goes into `cache`, a hashable value. `start` is the
    earliest start whose noise may still be asked for: the pending token's, unless it says so.
    `learned` is what a policy has seen of earlier rounds, for policies that learn.
    """

    text: Text
    round: int = 0
    cache: tuple = ()
    start: int | None = None
    learned: tuple = ()


class Record(NamedTuple):
    """Proposed tokens, and the laws they are said to be drawn from."""

    tokens: Text = ()
    laws: tuple[Law, ...] = ()


def always(_state: State, _proposed: Text) -> bool:
    """Propose K tokens; every q arrives."""
    return True


def propose(game: Game, state: State, chance: Chance) -> Record:
    """Draws tokens from the draft until K, or until the stopping rule says so."""
    return draft(game, state.text, lambda tokens: game.go_on(state, tokens), chance)


def draft(game: Game, text: Text, go_on: Callable[[Text], bool], chance: Chance) -> Record:
    """The record that follows a text; its keys carry the record's own start."""
    start, record = len(text) - 1, Record()
    while len(record.tokens) < game.k and go_on(record.tokens):
        so_far = text + record.tokens
        law = game.proposal(game, start, so_far, chance)
        token = chance.token(law, game.draft_key(game, start, len(so_far)))
        record = Record((*record.tokens, token), (*record.laws, law))
    return record


def ratio(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """Accepts x while u < p(x) / q(x); the bonus comes from the residual, or from p after L."""
    text, start = state.text, len(state.text) - 1
    for token, q in zip(record.tokens, record.laws, strict=True):
        p = game.target(text)
        if not chance.below(_odds(p[token], q[token]), Key(start, len(text), "accept")):
            return (*text, chance.token(residual(p, q), Key(start, len(text), "bonus")))
        text = (*text, token)
    return (*text, chance.token(game.target(text), Key(start, len(text), "bonus")))


def block(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """Accepts the longest draft whose uniform is below its h; see `survival` and `passes`."""
    start, tokens, laws = len(state.text) - 1, tuple(record.tokens), tuple(record.laws)
    texts = [state.text + tokens[:k] for k in range(len(tokens) + 1)]
    c = survival(game, texts, tokens, laws)
    k = len(tokens)
    while k and not chance.below(
        passes(c[k], game.target(texts[k]), laws[k]) if k < len(tokens) else c[k],
        Key(start, len(texts[k]) - 1, "accept"),
    ):
        k -= 1
    p = game.target(texts[k])
    law = residual(scaled(c[k], p), laws[k]) if k < len(tokens) else p
    return (*texts[k], chance.token(law, Key(start, len(texts[k]), "bonus")))


def survival(
    game: Game, texts: Sequence[Text], tokens: Text, laws: Sequence[Law]
) -> list[Fraction]:
    """c_0 = 1 and c_i = min(1, c_{i-1} p(x_i) / q(x_i))."""
    c = [Fraction(1)]
    for text, token, q in zip(texts, tokens, laws, strict=False):
        c.append(min(c[-1] * _odds(game.target(text)[token], q[token]), Fraction(1)))
    return c


def passes(c: Fraction, p: Law, q: Law) -> Fraction:
    """h = S / (S + 1 - c), S being the sum of max(c p - q, 0); 1 where c is."""
    surplus = sum(max(c * a - b, Fraction(0)) for a, b in zip(p, q, strict=True))
    return surplus / (surplus + 1 - c) if c < 1 else Fraction(1)


def scaled(c: Fraction, p: Law) -> Law:
    """c p, which is not normalised."""
    return tuple(c * share for share in p)


def coupled(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """The noise of a position draws the token from p; a proposal is accepted iff it is that one."""
    text = state.text
    for token in (*record.tokens, None):
        drawn = chance.token(game.target(text), Key(None, len(text), "token"))
        text = (*text, drawn)
        if drawn != token:
            break
    return text


def residual(p: Law, q: Law) -> Law:
    """max(p - q, 0), normalised; p where nothing is left."""
    left = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return normalised(left) if any(left) else p


def as_drafted(game: Game, _start: int, text: Text, _chance: Chance) -> Law:
    """The draft's own law."""
    return game.draft(text)


def own_key(game: Game, start: int, position: int) -> Key:
    """The draft's key: the target's noise under the coupled rule, else its own."""
    return Key(None, position, "token") if game.verify is coupled else Key(start, position, "draft")


@dataclass(frozen=True, kw_only=True)
class Game:
    """One configuration of speculative decoding.

    Attributes:
      target, draft: the next token's law, filters included.
      k: most tokens proposed a round.
      go_on: whether to draft one more token, from the state and the tokens drafted so far. It
        cannot see a token that it then drops, so L is a stopping time.
      q_arrives: whether the round's q came in time; without it the record is a point mass.
      proposal: the law that a record's next token is drawn from, given the record's start and the
        text with the tokens drafted so far.
      propose, verify, draft_key: the parts of a round.
    """

    target: Model
    draft: Model
    k: int
    go_on: Callable[[State, Text], bool] = always
    q_arrives: Callable[[State], bool] = lambda _state: True
    proposal: Callable[[Game, int, Text, Chance], Law] = as_drafted
    propose: Callable[[Game, State, Chance], Record] = propose
    verify: Callable[[Game, State, Record, Chance], Text] = ratio
    draft_key: Callable[[Game, int, int], Key] = own_key

    def round(self, state: State, chance: Chance) -> State:
        """One round; the text grows by the accepted tokens and the bonus."""
        record = self.propose(self, state, chance)
        if not self.q_arrives(state):
            record = as_points(record)
        return State(self.verify(self, state, record, chance), state.round + 1)


def as_points(record: Record) -> Record:
    """The same tokens, each with all the probability."""
    laws = (point(t, len(law)) for t, law in zip(record.tokens, record.laws, strict=True))
    return record._replace(laws=tuple(laws))


def _odds(p: Fraction, q: Fraction) -> Fraction:
    """p / q; without a q every possible token passes."""
    return p / q if q else Fraction(int(p > 0))
