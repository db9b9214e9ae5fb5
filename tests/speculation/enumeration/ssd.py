"""Speculative speculative decoding in rationals: whole runs of verify, look up, serve.

While a round is verified the draft prepares speculations for the outcomes (k, t*) that its fan-out
policy picked; the next round's record is the prepared one (a hit) or the backup's (a miss). What a
round serves is drawn when that round starts: a draw is a function of its key, so the branches that
nobody will look at need not be drawn at all. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from tests.speculation.enumeration.chance import Chance, Key, Law, Renamed
from tests.speculation.enumeration.filters import Text, normalised, point
from tests.speculation.enumeration.rounds import Game, Record, State, as_points, coupled, draft
from tests.speculation.enumeration.toys import repeats

COLD, HIT, LATE, MISS = "cold", "hit", "late", "miss"


class Served(NamedTuple):
    """Where a round's record comes from, and the most tokens it may have."""

    source: str
    limit: int = 0


class Judged(NamedTuple):
    """What a policy that learns is told of a round.

    Attributes:
      accepted, length: k of L proposed tokens.
      hit: whether they were a prepared speculation.
      prepared: bonus tokens prepared for this k.
      rank: place of the bonus token among them, if it is there.
      chances: the draft's probabilities of the proposed tokens.
    """

    accepted: int
    length: int
    hit: bool
    prepared: int
    rank: int | None
    chances: tuple[Fraction, ...]


class Situation(NamedTuple):
    """What may be looked at while a record is verified: all of it, later dropped tokens included.

    Attributes:
      state: where the round began.
      served: the source of the round's record.
      record: the tokens under verification, with the laws that they were drawn from.
      chances: the draft's probability of each of them, before Saguaro.
    """

    state: State
    served: Served
    record: Record
    chances: tuple[Fraction, ...]


Counts = tuple[int, ...]
FanOut = Callable[[Situation], Counts]
Backup = Callable[[Game, State, Chance], Record]


def ranked(law: Law) -> Text:
    """Token ids from the likeliest, ties to the lowest id."""
    return tuple(sorted(range(len(law)), key=lambda token: (-law[token], token)))


def candidates(game: Game, situation: Situation, k: int) -> Law:
    """The draft's law of the bonus token after k accepted tokens; the one rejected has no part."""
    tokens = situation.record.tokens
    law = game.draft(situation.state.text + tokens[:k])
    return tuple(Fraction(0) if (token,) == tokens[k : k + 1] else p for token, p in enumerate(law))


def by_law(game: Game, situation: Situation, k: int, count: int, _chance: Chance) -> Text:
    """The `count` likeliest bonus tokens after k accepted ones."""
    rejected = situation.record.tokens[k : k + 1]
    order = ranked(candidates(game, situation, k))
    return tuple(token for token in order if token not in rejected)[:count]


def by_noise(game: Game, situation: Situation, k: int, count: int, chance: Chance) -> Text:
    """The first `count` tokens in the order of log q plus the noise that will draw the bonus."""
    law = list(candidates(game, situation, k))
    key = bonus_key(game, len(situation.state.text) - 1, len(situation.state.text) + k)
    chosen: Text = ()
    while len(chosen) < count and any(law):
        chosen = (*chosen, chance.token(normalised(law), key))
        law[chosen[-1]] = Fraction(0)
    impossible = by_law(game, situation, k, len(law), chance)[len(chosen) :]
    return (*chosen, *(impossible[: count - len(chosen)]))


def bonus_key(game: Game, start: int, position: int) -> Key:
    """The key of the bonus token of a round."""
    return Key(None, position, "token") if game.verify is coupled else Key(start, position, "bonus")


def saguaro(c: Fraction, planned: Counts) -> Callable[[Game, int, Text, Chance], Law]:
    """Proposals drawn with the likeliest planned F_i + 1 tokens down-weighted by C."""

    def proposal(game: Game, start: int, text: Text, _chance: Chance) -> Law:
        law = game.draft(text)
        return down_weighted(law, ranked(law)[: planned[len(text) - 1 - start] + 1], c)

    return proposal


def down_weighted(law: Law, tokens: Text, c: Fraction) -> Law:
    """A law with the weight of some tokens times C; the same law if they cover its support."""
    if all(p == 0 or token in tokens for token, p in enumerate(law)):
        return law
    return normalised([p * c if token in tokens else p for token, p in enumerate(law)])


def nothing(_game: Game, _state: State, _chance: Chance) -> Record:
    """No proposal: the round is one step of ordinary decoding."""
    return Record()


def ngram(game: Game, state: State, _chance: Chance) -> Record:
    """K tokens repeated from the text."""
    law_of, text = repeats(len(game.target(state.text))), state.text
    while len(text) < len(state.text) + game.k:
        text = (*text, law_of(text).index(1))
    return _points(text[len(state.text) :], game)


def uniform_tokens(game: Game, state: State, chance: Chance) -> Record:
    """K tokens of a noise of their own."""
    size, start = len(game.target(state.text)), len(state.text) - 1
    law = normalised((1,) * size)
    keys = [Key(start, len(state.text) + step, "random") for step in range(game.k)]
    return _points(tuple(chance.token(law, key) for key in keys), game)


def just_in_time(game: Game, state: State, chance: Chance) -> Record:
    """K tokens of the draft, with the keys that a branch of this start would have had."""
    return draft(game, state.text, lambda tokens: game.go_on(state, tokens), chance)


def _points(tokens: Text, game: Game) -> Record:
    size = len(game.target(tokens))
    return Record(tokens, tuple(point(token, size) for token in tokens))


@dataclass(frozen=True, kw_only=True)
class Ssd:
    """One configuration of SSD. The first round has nothing to verify: it is the prefill.

    Attributes:
      game: the models, the most tokens a round, the rule, the keys; its `go_on` ends a record
        before K tokens.
      fan_out: how many bonus tokens to prepare after 0..L accepted tokens.
      rank: which ones.
      backup: the record of a round that missed.
      optional_step: whether branches after L accepted tokens propose K tokens and not K - 1.
      late: whether the speculation for a state comes a round too late; that round verifies nothing,
        and the next one what is left of the speculation if the text stayed on its path.
      learns: whether the fan-out looks at what earlier rounds have shown, in `State.learned`.
    """

    game: Game
    fan_out: FanOut
    rank: Callable[[Game, Situation, int, int, Chance], Text] = by_law
    backup: Backup = nothing
    optional_step: bool = False
    late: Callable[[State], bool] = lambda _state: False
    learns: bool = False

    def round(self, state: State, chance: Chance) -> State:
        """One round; the text grows by the accepted tokens and the bonus."""
        situation = self.begin(state, chance)
        return self.finish(situation, self.fan_out(situation), chance)

    def begin(self, state: State, chance: Chance) -> Situation:
        """What the round verifies."""
        served = Served(*state.cache) if state.cache else Served(COLD)
        record = self.serve(state, served, chance)
        texts = [state.text + record.tokens[:i] for i in range(len(record.tokens))]
        laws = [self.game.draft(text) for text in texts]
        chances = tuple(law[token] for law, token in zip(laws, record.tokens, strict=True))
        return Situation(state, served, record, chances)

    def serve(self, state: State, served: Served, chance: Chance) -> Record:
        """The record that a round verifies."""
        if served.source == HIT:
            start = len(state.text) - 1 if state.start is None else state.start
            branched = self.branch(state._replace(text=state.text[: start + 1]), served, chance)
            behind = len(state.text) - 1 - start
            return Record(branched.tokens[behind:], branched.laws[behind:])
        return self.backup(self.game, state, chance) if served.source == MISS else Record()

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The speculation that was prepared for a state."""

        def go_on(tokens: Text) -> bool:
            return len(tokens) < served.limit and self.game.go_on(state, tokens)

        return draft(self.game, state.text, go_on, chance)

    def finish(self, situation: Situation, counts: Counts, chance: Chance) -> State:
        """Verifies, and looks the outcome up among the branches."""
        state, served, record, chances = situation
        arrived = record if self.game.q_arrives(state) else as_points(record)
        text = self.game.verify(self.game, state, arrived, chance)
        after = State(text, state.round + 1, learned=state.learned)
        if served.source == LATE:
            if text[len(state.text) :] == self.branch(state, served, chance).tokens[:1]:
                return after._replace(cache=Served(HIT, served.limit), start=len(state.text) - 1)
            return after._replace(cache=Served(MISS))
        k = len(text) - len(state.text) - 1
        prepared = self.rank(self.game, situation, k, counts[k], chance)
        rank = prepared.index(text[-1]) if text[-1] in prepared else None
        if self.learns:
            source = served.source == HIT
            judged = Judged(k, len(record.tokens), source, len(prepared), rank, chances)
            after = after._replace(learned=(*state.learned, judged))
        if rank is None:
            return after._replace(cache=Served(MISS))
        tail = k == len(record.tokens) and not self.optional_step
        source = LATE if self.late(after) else HIT
        return after._replace(cache=Served(source, self.game.k - tail))


def together(
    ssd: Ssd, share: Callable[[list[Situation]], list[Counts]], enough: int
) -> Callable[[tuple[State, ...], Chance], tuple[State, ...]]:
    """Rounds of a batch whose rows share a budget; a row leaves when its text is long enough."""

    def step(rows: tuple[State, ...], chance: Chance) -> tuple[State, ...]:
        there = [request for request, row in enumerate(rows) if len(row.text) < enough]
        chances = {r: Renamed(chance, lambda key, r=r: key._replace(request=r)) for r in there}
        begun = [ssd.begin(rows[request], chances[request]) for request in there]
        after = list(rows)
        for request, situation, counts in zip(there, begun, share(begun), strict=True):
            row = ssd.finish(situation, counts, chances[request])
            after[request] = row if len(row.text) < enough else State(row.text[:enough])
        return tuple(after)

    return step
