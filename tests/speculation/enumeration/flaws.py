"""Flawed games, each beside the game it spoils and a toy that shows the flaw.

A flaw must change the emitted law; the same game without it must not. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from tests.speculation.enumeration import rounds
from tests.speculation.enumeration.chance import Chance, Key, Law
from tests.speculation.enumeration.filters import (
    Model,
    Text,
    normalised,
    presence,
    support,
    then,
    top_k,
    within,
    without,
)
from tests.speculation.enumeration.rounds import Game, Record, State
from tests.speculation.enumeration.toys import DENSE3, DRAFT2, TARGET2, TARGET3, iid, repeats

PLAIN = Game(target=TARGET3, draft=DENSE3, k=2)


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """A game, and what is wrong in the other one."""

    right: Game
    wrong: Game


def _claims(law_of: Model) -> Callable[[Game, State, Chance], Record]:
    """Draws as ever, and says that the tokens came from another law."""

    def propose(game: Game, state: State, chance: Chance) -> Record:
        record = rounds.propose(game, state, chance)
        texts = (state.text + record.tokens[:i] for i in range(len(record.tokens)))
        return record._replace(laws=tuple(law_of(text) for text in texts))

    return propose


def _drops_after_looking(game: Game, state: State, chance: Chance) -> Record:
    """Drafts K tokens, then keeps those before the first 0."""
    record = rounds.propose(game, state, chance)
    length = (*record.tokens, 0).index(0)
    return Record(record.tokens[:length], record.laws[:length])


def _has_no_law_behind_a_0(*, cut: bool) -> Callable[[Game, State, Chance], Record]:
    """Draws as ever, and has no law of what follows a 0. Tokens are point masses from the first one
    without a law on, or, if there is any, all of them."""

    def propose(game: Game, state: State, chance: Chance) -> Record:
        record = rounds.propose(game, state, chance)
        before = (state.text[-1], *record.tokens[:-1], 0)
        known = before.index(0)
        length = 0 if cut and known < len(record.tokens) else known
        points = rounds.as_points(record)
        return record._replace(laws=record.laws[:length] + points.laws[length:])

    return propose


def _no_residual(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """Draws the bonus from p after a rejection too."""
    text, start = state.text, len(state.text) - 1
    for token, q in zip(record.tokens, record.laws, strict=True):
        p = game.target(text)
        odds = p[token] / q[token]
        if not chance.below(odds, Key(start, len(text), "accept")):
            break
        text = (*text, token)
    return (*text, chance.token(game.target(text), Key(start, len(text), "bonus")))


def _greedy_rule(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """Accepts a token iff it is the likeliest one, and draws the bonus from p."""
    text, start = state.text, len(state.text) - 1
    for token in record.tokens:
        p = game.target(text)
        if token != p.index(max(p)):
            break
        text = (*text, token)
    return (*text, chance.token(game.target(text), Key(start, len(text), "bonus")))


def _blind(game: Game, state: State, record: Record, chance: Chance) -> Text:
    """Every row of the verification sees the penalties of the committed text only."""

    def target(text: Text) -> Law:
        weights = enumerate(TARGET3(text))
        return normalised([p * PENALTY if t in state.text else p for t, p in weights])

    return rounds.ratio(replace(game, target=target), state, record, chance)


WORDS = ((0, 1), (1, 2, 2), (2, 0, 0))
WORDED = Game(target=without(TARGET3, WORDS), draft=DENSE3, k=2)


def _by(banned: Callable[[State, Text], Law]) -> Game:
    """The game whose target, in a round that begins with this state, has other laws."""

    def verify(game: Game, state: State, record: Record, chance: Chance) -> Text:
        wrong = replace(game, target=lambda text: banned(state, text))
        return rounds.ratio(wrong, state, record, chance)

    return replace(WORDED, verify=verify)


def _banned(text: Text, words: Sequence[Text], output: Text) -> Law:
    """The target's law after a text, with the bans that follow an output."""
    model = without(lambda _output: TARGET3(text), words, prompt=0)
    return model(output)


def _one_later(_state: State, text: Text) -> Law:
    """Bans follow the text without its last token."""
    return _banned(text, WORDS, text[1:-1])


def _block(
    *, capped: bool = True, short: bool = False, scaled: bool = True
) -> Callable[[Game, State, Record, Chance], Text]:
    """Block verification: right, or by the uncapped product of the odds, or with drafts judged at
    their end as if another token of the draft's law followed, or with a residual of p, not c p."""

    def verify(game: Game, state: State, record: Record, chance: Chance) -> Text:
        start, tokens = len(state.text) - 1, record.tokens
        texts = [state.text + tokens[:k] for k in range(len(tokens) + 1)]
        laws = (*record.laws, game.draft(texts[-1]))
        c = rounds.survival(game, texts, tokens, laws)
        if not capped:
            for k, (token, q) in enumerate(zip(tokens, record.laws, strict=True)):
                c[k + 1] = c[k] * game.target(texts[k])[token] / q[token]
        k = len(tokens)
        while k and not chance.below(
            rounds.passes(c[k], game.target(texts[k]), laws[k])
            if short or k < len(tokens)
            else c[k],
            Key(start, len(texts[k]) - 1, "accept"),
        ):
            k -= 1
        law = p = game.target(texts[k])
        if k < len(tokens):
            law = rounds.residual(rounds.scaled(c[k] if scaled else Fraction(1), p), laws[k])
        return (*texts[k], chance.token(law, Key(start, len(texts[k]), "bonus")))

    return verify


PENALTY = Fraction(1, 4)
PENALISED = Game(target=presence(TARGET3, PENALTY), draft=DENSE3, k=2)
SPARSE = replace(PLAIN, draft=then(DENSE3, lambda law: support(law, 2)))
REDUCED = replace(PLAIN, draft=then(DENSE3, lambda law: within(law, (0, 2))))
TRUNCATED = Game(
    target=then(TARGET3, lambda law: top_k(law, 2)),
    draft=then(DENSE3, lambda law: top_k(law, 2)),
    k=2,
)
NGRAM = Game(target=TARGET3, draft=repeats(3), k=2)


def with_one_entry(game: Game) -> Callable[[State, Chance], State]:
    """Rounds of SSD with a cache of one entry, in its smallest form.

    The entry is the outcome 'nothing accepted' (with two tokens its bonus is certain) if the second
    proposed token is a 0, else another outcome. A round after 'nothing accepted' that was not the
    entry is a miss and proposes nothing.
    """

    def step(state: State, chance: Chance) -> State:
        missed = state.cache == ("missed",)
        record = Record() if missed else game.propose(game, state, chance)
        text = game.verify(game, state, record, chance)
        hit = missed or len(text) > len(state.text) + 1 or record.tokens[1] == 0
        return State(text, state.round + 1, () if hit else ("missed",))

    return step


CACHED = Game(target=iid(1, 1), draft=iid(4, 1), k=2)
START_DROPPED = replace(
    CACHED, draft_key=lambda _game, _start, position: Key(None, position, "draft")
)

FLAWS = {
    "wrong q": Flaw(
        right=PLAIN, wrong=replace(PLAIN, propose=_claims(lambda _text: normalised((1, 1, 1))))
    ),
    "q before the support was cut": Flaw(
        right=SPARSE, wrong=replace(SPARSE, propose=_claims(DENSE3))
    ),
    "q of the whole vocabulary for a reduced one": Flaw(
        right=REDUCED, wrong=replace(REDUCED, propose=_claims(DENSE3))
    ),
    "q before top-k": Flaw(right=TRUNCATED, wrong=replace(TRUNCATED, propose=_claims(DENSE3))),
    "stale q for a point mass": Flaw(right=NGRAM, wrong=replace(NGRAM, propose=_claims(DENSE3))),
    "dropped residual": Flaw(right=PLAIN, wrong=replace(PLAIN, verify=_no_residual)),
    "block verification by the uncapped product": Flaw(
        right=replace(PLAIN, verify=_block()), wrong=replace(PLAIN, verify=_block(capped=False))
    ),
    "block verification of an end as if more were proposed": Flaw(
        right=replace(PLAIN, verify=_block()), wrong=replace(PLAIN, verify=_block(short=True))
    ),
    "block verification with a residual of p for c p": Flaw(
        right=replace(PLAIN, k=3, verify=_block()),
        wrong=replace(PLAIN, k=3, verify=_block(scaled=False)),
    ),
    "greedy rule for sampled rows": Flaw(right=PLAIN, wrong=replace(PLAIN, verify=_greedy_rule)),
    "L chosen by looking at a dropped token": Flaw(
        right=PLAIN, wrong=replace(PLAIN, propose=_drops_after_looking)
    ),
    "point masses where a later token has no law": Flaw(
        right=replace(PLAIN, propose=_has_no_law_behind_a_0(cut=False)),
        wrong=replace(PLAIN, propose=_has_no_law_behind_a_0(cut=True)),
    ),
    "bad words blind to tokens in flight": Flaw(
        right=WORDED,
        wrong=_by(lambda state, text: _banned(text, WORDS, state.text[1:])),
    ),
    "bad words one token late": Flaw(right=WORDED, wrong=_by(_one_later)),
    "a bad word's beginning bans the end of another": Flaw(
        right=WORDED,
        wrong=_by(
            lambda _state, text: _banned(text, ((0, 2), (1, 2, 0), (2, 0, 1)), text[1:]),
        ),
    ),
    "bad words of a text that begins in the prompt": Flaw(
        right=WORDED, wrong=_by(lambda _state, text: _banned(text, WORDS, text))
    ),
    "penalties blind to tokens in flight": Flaw(
        right=PENALISED, wrong=replace(PENALISED, verify=_blind)
    ),
    "the draft's draw reused as the bonus": Flaw(
        right=PLAIN,
        wrong=replace(
            PLAIN, draft_key=lambda _game, start, position: Key(start, position, "bonus")
        ),
    ),
    "the draft's draw reused to accept": Flaw(
        right=Game(target=TARGET2, draft=DRAFT2, k=2),
        wrong=Game(
            target=TARGET2,
            draft=DRAFT2,
            k=2,
            draft_key=lambda _game, start, position: Key(start, position, "accept"),
        ),
    ),
}
