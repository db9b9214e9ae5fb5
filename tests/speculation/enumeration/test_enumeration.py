"""Whole runs of speculative decoding emit exactly the target's law: no sampling, no rounding."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest

from tests.speculation.enumeration import filters, toys
from tests.speculation.enumeration.chance import Chance, Key, paths
from tests.speculation.enumeration.filters import Text, support, then
from tests.speculation.enumeration.flaws import CACHED, FLAWS, START_DROPPED, with_one_entry
from tests.speculation.enumeration.laws import autoregressive, emitted
from tests.speculation.enumeration.rounds import Game, State, block, coupled, ratio
from tests.speculation.enumeration.toys import PROMPT

RULES = pytest.mark.parametrize("verify", [ratio, block, coupled])
READ_Q = pytest.mark.parametrize("verify", [ratio, block])


def assert_exact(game: Game, count: int) -> None:
    assert emitted(game.round, PROMPT, count) == autoregressive(game.target, PROMPT, count)


DRAFTS = {
    "dense q": toys.DENSE3,
    "q with zeros": toys.DRAFT3,
    "q with ties": toys.TIES3,
    "the target itself": toys.TARGET3,
    "sparse q": then(toys.DENSE3, lambda law: support(law, 2)),
    "sparse q of a law with zeros": then(toys.DRAFT3, lambda law: support(law, 2)),
    "a reduced vocabulary": then(toys.DENSE3, lambda law: filters.within(law, (0, 2))),
    "a reduced vocabulary of one": then(toys.DENSE3, lambda law: filters.within(law, (1,))),
    "greedy": then(toys.DENSE3, lambda law: support(law, 1)),
    "n-gram": toys.repeats(3),
    "another temperature": then(toys.DENSE3, lambda law: filters.sharpen(law, 3)),
}


@RULES
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize(("k", "count"), [(1, 4), (2, 3), (3, 2)])
def test_any_draft_keeps_the_law(verify, draft, k, count):
    assert_exact(Game(target=toys.TARGET3, draft=draft, k=k, verify=verify), count)


@RULES
@pytest.mark.parametrize("k", [1, 2, 3])
def test_four_tokens_of_two_keep_the_law(verify, k):
    assert_exact(Game(target=toys.TARGET2, draft=toys.DRAFT2, k=k, verify=verify), 4)


FILTERS = {
    "temperature": [lambda law: filters.sharpen(law, 2)],
    "top-k": [lambda law: filters.top_k(law, 2)],
    "top-p": [lambda law: filters.top_p(law, Fraction(3, 5))],
    "min-p": [lambda law: filters.min_p(law, Fraction(1, 2))],
    "all": [
        lambda law: filters.sharpen(law, 2),
        lambda law: filters.top_k(law, 2),
        lambda law: filters.top_p(law, Fraction(9, 10)),
        lambda law: filters.min_p(law, Fraction(1, 4)),
    ],
}


@READ_Q
@pytest.mark.parametrize("sides", ["both", "target", "draft"])
@pytest.mark.parametrize("truncation", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("target", [toys.TARGET3, toys.TIES3], ids=["zeros", "ties"])
def test_every_truncation_keeps_the_law_on_either_side(verify, target, truncation, sides):
    draft = toys.DENSE3
    if sides != "draft":
        target = then(target, *truncation)
    if sides != "target":
        draft = then(draft, *truncation)
    assert_exact(Game(target=target, draft=draft, k=2, verify=verify), 3)


@RULES
def test_penalties_that_see_tokens_in_flight_keep_the_law(verify):
    target = filters.presence(toys.TARGET3, Fraction(1, 4))
    assert_exact(Game(target=target, draft=toys.DENSE3, k=2, verify=verify), 3)


@RULES
@pytest.mark.parametrize("sides", ["both", "target"])
@pytest.mark.parametrize("k", [1, 2])
def test_bad_words_that_see_tokens_in_flight_keep_the_law(verify, sides, k):
    words = ((0, 1), (1, 2, 2))
    target, draft = filters.without(toys.TARGET3, words), toys.DENSE3
    if sides == "both":
        draft = filters.without(draft, words)
    game = Game(target=target, draft=draft, k=k, verify=verify)
    count = 4 if k == 1 else 3
    law = emitted(game.round, PROMPT, count)
    assert law == autoregressive(target, PROMPT, count)
    assert {0, 1, 2} == {token for text in law for token in text}
    for text in law:
        parts = {text[begin:end] for begin in range(count) for end in range(count + 1)}
        assert not parts & {*words}


STOPPING = {
    "nothing": lambda _state, _proposed: False,
    "one": lambda _state, proposed: len(proposed) < 1,
    "by the round": lambda state, proposed: len(proposed) < (2, 0, 1)[state.round % 3],
    "by the text": lambda state, proposed: len(proposed) < state.text.count(1) + 1,
    "after a 2": lambda _state, proposed: 2 not in proposed,
    "by the last token kept": lambda state, proposed: (*state.text, *proposed)[-1] != 1,
}


@RULES
@pytest.mark.parametrize("go_on", STOPPING.values(), ids=STOPPING)
def test_a_length_that_is_a_stopping_time_keeps_the_law(verify, go_on):
    assert_exact(Game(target=toys.TARGET3, draft=toys.DENSE3, k=3, verify=verify, go_on=go_on), 3)


@READ_Q
@pytest.mark.parametrize("draft", [toys.DENSE3, toys.DRAFT3], ids=["dense", "zeros"])
def test_a_late_q_is_verified_as_a_point_mass_and_keeps_the_law(verify, draft):
    def every_second(state):
        return state.round % 2 == 1

    game = Game(target=toys.TARGET3, draft=draft, k=2, verify=verify, q_arrives=every_second)
    assert_exact(game, 3)


def ends(game: Game) -> dict[tuple[Text, Text], Fraction]:
    """How likely a first round is to propose these tokens and emit those."""
    found: dict[tuple[Text, Text], Fraction] = defaultdict(Fraction)

    def play(chance: Chance) -> tuple[Text, Text]:
        record = game.propose(game, State(PROMPT), chance)
        return record.tokens, game.verify(game, State(PROMPT), record, chance)[len(PROMPT) :]

    for result, _, mass in paths(play, frozenset(), lambda _key: True):
        found[result] += mass
    return found


@READ_Q
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_the_token_behind_the_accepted_ones_is_never_the_one_rejected_there(verify, draft):
    for tokens, text in ends(Game(target=toys.TARGET3, draft=draft, k=3, verify=verify)):
        assert text[-1:] != tokens[len(text) - 1 : len(text)]


@pytest.mark.parametrize("target", [toys.TARGET3, toys.TIES3], ids=["zeros", "ties"])
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_verification_accepts_as_much_as_the_ratio_rule_or_more(target, draft, k):
    def accepted(verify) -> Fraction:
        game = Game(target=target, draft=draft, k=k, verify=verify)
        return sum(mass * (len(text) - 1) for (_, text), mass in ends(game).items())

    by_block, by_ratio = accepted(block), accepted(ratio)
    assert by_block >= by_ratio
    assert by_block > by_ratio or k < 3 or draft is not toys.DENSE3


@pytest.mark.parametrize("flaw", FLAWS.values(), ids=FLAWS)
def test_every_flaw_changes_the_law_and_its_absence_does_not(flaw):
    assert_exact(flaw.right, 3)
    wrong = flaw.wrong
    assert emitted(wrong.round, PROMPT, 3) != autoregressive(wrong.target, PROMPT, 3)


def test_a_start_dropped_from_the_key_biases_what_a_small_cache_serves():
    expected = autoregressive(CACHED.target, PROMPT, 2)
    assert emitted(with_one_entry(CACHED), PROMPT, 2) == expected
    # Nothing is accepted with 3/10, and then 3/5 of the next tokens are 0; else 1/2 as it should.
    law = emitted(with_one_entry(START_DROPPED), PROMPT, 2)
    assert law[1, 0] == Fraction(3, 10) * Fraction(3, 5) + Fraction(1, 5) * Fraction(1, 2)
    assert expected[1, 0] == Fraction(1, 4)


def test_without_a_cache_a_start_dropped_from_the_key_goes_unnoticed():
    assert_exact(START_DROPPED, 4)


def test_noise_drawn_from_twice_has_the_joint_law_of_exponential_clocks():
    """P(E_0 / p_0 and E_0 / q_0 both least) = 1 / sum_v max(p_v / p_0, q_v / q_0)."""
    p, q = filters.normalised((5, 3, 2)), filters.normalised((1, 1, 4))
    key = Key(None, 1, "token")
    joint = {
        pair: mass
        for pair, _, mass in paths(
            lambda chance: (chance.token(p, key), chance.token(q, key)),
            frozenset(),
            lambda _key: True,
        )
    }
    for token in range(3):
        both = sum(max(p[v] / p[token], q[v] / q[token]) for v in range(3))
        assert joint[token, token] == 1 / both
        assert sum(mass for pair, mass in joint.items() if pair[0] == token) == p[token]
        assert sum(mass for pair, mass in joint.items() if pair[1] == token) == q[token]
