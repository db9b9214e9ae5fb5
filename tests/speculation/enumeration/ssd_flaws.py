"""Flawed rounds of SSD, each beside the rounds it spoils, on a toy built to show the flaw.

Most of them let the values of proposed tokens, or the noise that will judge them, decide what is
served with its q. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fractions import Fraction

from tests.speculation.enumeration import rounds
from tests.speculation.enumeration.chance import Chance, Key, Law, Renamed
from tests.speculation.enumeration.filters import Text
from tests.speculation.enumeration.rounds import Game, Record, State, as_points
from tests.speculation.enumeration.ssd import (
    HIT,
    MISS,
    Counts,
    Served,
    Situation,
    Ssd,
    bonus_key,
    down_weighted,
    just_in_time,
    saguaro,
    uniform_tokens,
)
from tests.speculation.enumeration.ssd_policies import (
    confidence,
    uniform,
    where_noise_is_sure,
    where_noise_rejects,
)
from tests.speculation.enumeration.toys import DENSE3, DRAFT2, TARGET2, TARGET3, TIES3, iid

HALF = Fraction(1, 2)


@dataclass(frozen=True, kw_only=True)
class Rekeyed(Ssd):
    """The same rounds with other keys."""

    rename: Callable[[Key], Key]

    def round(self, state: State, chance: Chance) -> State:
        """One round, whose draws are renamed."""
        return super().round(state, Renamed(chance, self.rename))


def start_dropped(purpose: str) -> Callable[[Key], Key]:
    """A key that tells its position, and not the round or record that it serves."""
    return lambda key: key._replace(start=None) if key.purpose == purpose else key


def as_other(purpose: str, other: str) -> Callable[[Key], Key]:
    """A draw that uses another purpose's noise."""
    return lambda key: key._replace(purpose=other) if key.purpose == purpose else key


class ShortHits(Ssd):
    """A branch has one token when it is served; a backup has more."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The first token of the speculation."""
        return super().branch(state, served._replace(limit=1), chance)


class RekeyedShortHits(ShortHits, Rekeyed):
    """Both: whether a hit made the record short then depends on noise that is drawn from again."""


class OneOfTwo(Ssd):
    """Every outcome has two speculations, of independent noise."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The one of the two that is served: blind to content."""
        return self.two(state, served, chance)[state.round % 2]

    def two(self, state: State, served: Served, chance: Chance) -> list[Record]:
        """Both speculations."""
        chances = (chance, Renamed(chance, as_other("draft", "second")))
        return [super(OneOfTwo, self).branch(state, served, chance) for chance in chances]


class BestOfTwo(OneOfTwo):
    """Serves the speculation that the draft finds likelier."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The likelier of the two."""
        return max(self.two(state, served, chance), key=_likelihood)


def _likelihood(record: Record) -> Fraction:
    product = Fraction(1)
    for token, law in zip(record.tokens, record.laws, strict=True):
        product *= law[token]
    return product


class CutBeforeAOne(Ssd):
    """Serves the tokens before the first 1."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The record without that token and what follows it."""
        record = super().branch(state, served, chance)
        length = (*record.tokens, 1).index(1)
        return Record(record.tokens[:length], record.laws[:length])


class DoubtsQ(Ssd):
    """Verifies a speculation that begins with an unlikely token as a point mass."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The record with or without its q."""
        record = super().branch(state, served, chance)
        return as_points(record) if record.tokens and _doubtful(record, 0) else record


def _doubtful(record: Record, index: int) -> bool:
    law = record.laws[index]
    return law[record.tokens[index]] < max(law)


class RedraftsPoor(Ssd):
    """Drops a speculation that begins with an unlikely token and drafts another one."""

    again = "draft"

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The first draft, or the second one."""
        record = super().branch(state, served, chance)
        if record.tokens and _doubtful(record, 0):
            renamed = Renamed(chance, as_other("draft", self.again))
            return super().branch(state, served, renamed)
        return record


class RedraftsWithNewNoise(RedraftsPoor):
    """The second draft has noise of its own."""

    again = "again"


class OfAnotherRank(Ssd):
    """Serves the tokens prepared for another bonus token, with their own q."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """The speculation of the outcome whose bonus token is the next id."""
        size = len(self.game.target(state.text))
        other = (*state.text[:-1], (state.text[-1] + 1) % size)
        return super().branch(state._replace(text=other), served, chance)


class OfAnotherRankWithOurQ(OfAnotherRank):
    """The same tokens, with the q of the outcome that came."""

    def branch(self, state: State, served: Served, chance: Chance) -> Record:
        """Tokens of one branch, laws of another."""
        record = super().branch(state, served, chance)
        texts = (state.text + record.tokens[:i] for i in range(len(record.tokens)))
        return record._replace(laws=tuple(self.game.draft(text) for text in texts))


class RedrawsOnAMiss(Ssd):
    """A miss draws the pending bonus token again, from p."""

    def finish(self, situation: Situation, counts: Counts, chance: Chance) -> State:
        """The round, with another last token after a miss."""
        after = super().finish(situation, counts, chance)
        if Served(*after.cache).source != MISS:
            return after
        text = after.text[:-1]
        key = Key(len(situation.state.text) - 1, len(text), "redraw")
        return after._replace(text=(*text, chance.token(self.game.target(text), key)))


class ReusesTheTail(Ssd):
    """After a miss proposes the tokens that came after the rejected one, with their q."""

    def finish(self, situation: Situation, counts: Counts, chance: Chance) -> State:
        """The round; after a miss the old record goes on from where the text is."""
        after = super().finish(situation, counts, chance)
        missed = Served(*after.cache).source == MISS
        if not missed or situation.served.source != HIT or situation.state.start is not None:
            return after
        return after._replace(cache=situation.served, start=len(situation.state.text) - 1)


class RecomputesSaguaro(Ssd):
    """The verifier works q out again, with the fan-out that was chosen afterwards."""

    def finish(self, situation: Situation, counts: Counts, chance: Chance) -> State:
        """The round, with other laws beside the same tokens."""
        record, start = situation.record, len(situation.state.text) - 1
        texts = (situation.state.text + record.tokens[:i] for i in range(len(record.tokens)))
        law_of = saguaro(HALF, counts)
        laws = tuple(law_of(self.game, start, text, chance) for text in texts)
        return super().finish(
            situation._replace(record=Record(record.tokens, laws)), counts, chance
        )


def ties_to_the_highest(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """Verifies with a q worked out again, where equals go to the highest id."""
    laws = []
    for index, law in enumerate(record.laws):
        plain = game.draft(state.text + record.tokens[:index])
        order = sorted(range(len(law)), key=lambda token: (-plain[token], -token))
        laws.append(down_weighted(plain, tuple(order[:2]), HALF))
    return rounds.ratio(game, state, Record(record.tokens, tuple(laws)), chance)


def set_by_noise(game: Game, start: int, text: Text, chance: Chance) -> Law:
    """Down-weights the token that the bonus noise would draw, and not the likeliest."""
    law = game.draft(text)
    return down_weighted(law, (chance.token(law, bonus_key(game, start, len(text))),), HALF)


def like(ssd: Ssd, kind: Callable[..., Ssd], **changes: object) -> Ssd:
    """The same configuration as another kind of rounds."""
    parts = {field.name: getattr(ssd, field.name) for field in fields(ssd)}
    return kind(**(parts | changes))


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """Rounds that emit the target's law in `count` tokens, and rounds that do not."""

    right: Ssd
    wrong: Ssd
    count: int = 3


TWO = Ssd(game=Game(target=TARGET2, draft=DRAFT2, k=2), fan_out=uniform(2))
THREE = replace(TWO, game=Game(target=TARGET3, draft=DENSE3, k=2))
# A fair coin drafted as a loaded one: what was drafted decides what is prepared.
COIN = Ssd(game=Game(target=iid(1, 1), draft=iid(4, 1), k=3), fan_out=confidence(3))
EARLY = replace(THREE, game=Game(target=iid(5, 3, 2), draft=iid(1, 2, 2), k=2), optional_step=True)
SURE = replace(EARLY, rank=where_noise_is_sure)
REJECTING = replace(EARLY, rank=where_noise_rejects)
RANDOM = replace(THREE, backup=uniform_tokens)
SAGUARO = replace(
    THREE, game=replace(THREE.game, proposal=saguaro(HALF, (1, 1))), fan_out=confidence(3)
)
TIED = replace(SAGUARO, game=replace(SAGUARO.game, draft=TIES3))
STOPS = replace(TWO, game=replace(TWO.game, go_on=lambda _state, tokens: 1 not in tokens))

FLAWS = {
    "start dropped from the draft's key": Flaw(
        right=COIN, wrong=like(COIN, Rekeyed, rename=start_dropped("draft"))
    ),
    "start dropped where a hit is shorter than a redraft": Flaw(
        right=like(COIN, ShortHits, backup=just_in_time),
        wrong=like(COIN, RekeyedShortHits, backup=just_in_time, rename=start_dropped("draft")),
        count=5,
    ),
    "start dropped from the bonus key": Flaw(
        right=SURE, wrong=like(SURE, Rekeyed, rename=start_dropped("bonus"))
    ),
    "start dropped from the accept key": Flaw(
        right=REJECTING, wrong=like(REJECTING, Rekeyed, rename=start_dropped("accept"))
    ),
    "the backup's noise reused as the bonus": Flaw(
        right=RANDOM, wrong=like(RANDOM, Rekeyed, rename=as_other("random", "bonus"))
    ),
    "best of two by content": Flaw(right=like(TWO, OneOfTwo), wrong=like(TWO, BestOfTwo)),
    "length chosen by content": Flaw(right=STOPS, wrong=like(TWO, CutBeforeAOne)),
    "q kept or dropped by content": Flaw(right=TWO, wrong=like(TWO, DoubtsQ)),
    "a poor speculation drafted again": Flaw(
        right=like(TWO, RedraftsPoor), wrong=like(TWO, RedraftsWithNewNoise)
    ),
    "tokens of one branch, q of another": Flaw(
        right=like(TWO, OfAnotherRank), wrong=like(TWO, OfAnotherRankWithOurQ)
    ),
    "a dropped tail whose tokens chose the fan-out": Flaw(
        right=replace(like(COIN, ReusesTheTail), fan_out=uniform(3)),
        wrong=like(COIN, ReusesTheTail),
    ),
    "pending bonus redrawn on a miss": Flaw(right=TWO, wrong=like(TWO, RedrawsOnAMiss)),
    "Saguaro set from the fan-out that came after": Flaw(
        right=SAGUARO, wrong=like(SAGUARO, RecomputesSaguaro)
    ),
    "Saguaro set recomputed with other ties": Flaw(
        right=TIED, wrong=replace(TIED, game=replace(TIED.game, verify=ties_to_the_highest))
    ),
    "Saguaro set chosen by the bonus noise": Flaw(
        right=SAGUARO, wrong=replace(SAGUARO, game=replace(SAGUARO.game, proposal=set_by_noise))
    ),
}
