"""Whole runs of SSD emit exactly the target's law, whatever is prepared, served and missed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.selection import cases
from tests.speculation.enumeration import filters, ssd_policies, toys
from tests.speculation.enumeration.chance import Chance, Key, paths
from tests.speculation.enumeration.filters import support, then
from tests.speculation.enumeration.laws import autoregressive, emitted, emitted_by_batch
from tests.speculation.enumeration.rounds import Game, State, block, coupled, ratio
from tests.speculation.enumeration.ssd import (
    HIT,
    LATE,
    MISS,
    Ssd,
    by_law,
    by_noise,
    just_in_time,
    ngram,
    nothing,
    saguaro,
    together,
    uniform_tokens,
)
from tests.speculation.enumeration.ssd_policies import where_noise_is_sure, where_noise_rejects
from tests.speculation.enumeration.toys import PROMPT

GAME = Game(target=toys.TARGET3, draft=toys.DENSE3, k=2)
HALF = Fraction(1, 2)
RULES = pytest.mark.parametrize("verify", [ratio, block, coupled])
READ_Q = pytest.mark.parametrize("verify", [ratio, block])

FAN_OUTS = {
    "uniform": ssd_policies.uniform(3),
    "lists": ssd_policies.lists((0, 1, 1), (1, 0, 1)),
    "geometric": ssd_policies.geometric(2, 0.25, 1.0),
    "confidence": ssd_policies.confidence(3),
}
BACKUPS = {"none": nothing, "ngram": ngram, "random": uniform_tokens, "draft": just_in_time}
EVERY_FAN_OUT = pytest.mark.parametrize("fan_out", FAN_OUTS.values(), ids=FAN_OUTS)
EVERY_BACKUP = pytest.mark.parametrize("backup", BACKUPS.values(), ids=BACKUPS)


def sources(ssd: Ssd, count: int) -> dict[str, Fraction]:
    """The expected number of rounds by the source of their record; the law must be the target's."""
    rounds: dict[str, Fraction] = defaultdict(Fraction)

    def watch(row: State, mass: Fraction) -> None:
        rounds[row.cache[0]] += mass

    law = emitted(ssd.round, PROMPT, count, watch)
    assert law == autoregressive(ssd.game.target, PROMPT, count)
    return rounds


def assert_exact_with_hits_and_misses(ssd: Ssd, count: int) -> None:
    rounds = sources(ssd, count)
    assert rounds[HIT] > 0
    assert rounds[MISS] > 0


def hit_rate(ssd: Ssd, count: int) -> Fraction:
    rounds = sources(ssd, count)
    return rounds[HIT] / (rounds[HIT] + rounds[MISS])


@RULES
@EVERY_BACKUP
@EVERY_FAN_OUT
@pytest.mark.parametrize("rank", cases([by_law, by_noise], by_noise))
def test_any_fan_out_backup_and_ranking_keep_the_law(verify, backup, fan_out, rank):
    ssd = Ssd(game=replace(GAME, verify=verify), fan_out=fan_out, rank=rank, backup=backup)
    assert_exact_with_hits_and_misses(ssd, 4 if verify is not coupled else 3)


@RULES
@EVERY_FAN_OUT
def test_longer_records_keep_the_law(verify, fan_out):
    ssd = Ssd(game=replace(GAME, verify=verify, k=3), fan_out=fan_out)
    assert_exact_with_hits_and_misses(ssd, 4)


@READ_Q
@EVERY_FAN_OUT
@pytest.mark.parametrize("rank", [where_noise_is_sure, where_noise_rejects])
def test_a_fan_out_that_foresees_the_noise_of_the_round_keeps_the_law(verify, fan_out, rank):
    ssd = Ssd(game=replace(GAME, verify=verify), fan_out=fan_out, rank=rank, optional_step=True)
    assert_exact_with_hits_and_misses(ssd, 3)


# With N = 2 the two likeliest tokens would cover the support: there F_0 = 0 is planned.
SUPPORTS = {"full": (3, (1, 1)), "sparse": (2, (0, 1))}


@EVERY_FAN_OUT
@pytest.mark.parametrize(
    "c", cases([Fraction(1), HALF, Fraction(0)], HALF), ids=["C=1", "C=.5", "C=0"]
)
@pytest.mark.parametrize(("n", "planned"), SUPPORTS.values(), ids=SUPPORTS)
@pytest.mark.parametrize("backup", [nothing, just_in_time], ids=["none", "draft"])
@pytest.mark.parametrize("verify", cases([ratio, block], ratio))
def test_saguaro_sampling_keeps_the_law(verify, fan_out, c, n, planned, backup):
    draft = then(toys.DENSE3, lambda law: support(law, n))
    game = Game(target=toys.TARGET3, draft=draft, k=2, proposal=saguaro(c, planned), verify=verify)
    assert_exact_with_hits_and_misses(Ssd(game=game, fan_out=fan_out, backup=backup), 4)


@EVERY_BACKUP
@pytest.mark.parametrize("c", [HALF, Fraction(0)], ids=["C=.5", "C=0"])
def test_saguaro_sampling_of_a_sparse_q_of_four_tokens_keeps_the_law(backup, c):
    target = toys.table(((4, 3, 2, 1), (0, 1, 2, 2), (1, 0, 0, 1), (2, 1, 1, 1)))
    draft = toys.table(((1, 1, 2, 3), (2, 1, 1, 2), (3, 1, 2, 0), (1, 2, 1, 1)))
    game = Game(
        target=target,
        draft=then(draft, lambda law: support(law, 3)),
        k=2,
        proposal=saguaro(c, (1, 1)),
    )
    ssd = Ssd(game=game, fan_out=ssd_policies.confidence(3), backup=backup)
    assert_exact_with_hits_and_misses(ssd, 3)


@RULES
@pytest.mark.parametrize("backup", [nothing, just_in_time], ids=["none", "draft"])
@pytest.mark.parametrize("rank", cases([by_law, by_noise], by_noise))
def test_a_reduced_vocabulary_keeps_the_law(verify, backup, rank):
    """What the draft cannot say it neither proposes nor prepares for."""
    outputs = (0, 2)

    def known(*about):
        return tuple(token for token in rank(*about) if token in outputs)

    game = replace(
        GAME, draft=then(toys.DENSE3, lambda law: filters.within(law, outputs)), verify=verify
    )
    if verify is not coupled:
        game = replace(game, proposal=saguaro(HALF, (0, 0)))
    ssd = Ssd(game=game, fan_out=ssd_policies.confidence(3), rank=known, backup=backup)
    assert_exact_with_hits_and_misses(ssd, 3)


@READ_Q
@pytest.mark.parametrize("c", [HALF, Fraction(0)], ids=["C=.5", "C=0"])
def test_saguaro_sampling_with_noise_aware_ranking_keeps_the_law(verify, c):
    ssd = Ssd(
        game=replace(GAME, verify=verify, proposal=saguaro(c, (1, 1))),
        fan_out=ssd_policies.confidence(3),
        rank=by_noise,
    )
    assert_exact_with_hits_and_misses(ssd, 4)


@RULES
@pytest.mark.parametrize("k", [2, 3])
def test_a_cache_of_every_outcome_always_hits_and_keeps_the_law(verify, k):
    game = replace(GAME, verify=verify, k=k)
    rounds = sources(Ssd(game=game, fan_out=ssd_policies.forced(3)), 4)
    assert rounds[HIT] > 0
    assert set(rounds) == {HIT}


@RULES
@EVERY_BACKUP
def test_a_cache_that_never_hits_keeps_the_law(verify, backup):
    game = replace(GAME, verify=verify)
    rounds = sources(Ssd(game=game, fan_out=ssd_policies.forced(0), backup=backup), 4)
    assert set(rounds) == {MISS}


LENGTHS = {
    "by the round": lambda state, tokens: len(tokens) < (2, 3, 1)[state.round % 3],
    "by the text": lambda state, tokens: len(tokens) < state.text.count(1) + 1,
    "after a 1": lambda _state, tokens: 1 not in tokens,
}


@RULES
@EVERY_FAN_OUT
@pytest.mark.parametrize("go_on", LENGTHS.values(), ids=LENGTHS)
def test_a_served_length_that_is_a_stopping_time_keeps_the_law(verify, fan_out, go_on):
    game = replace(GAME, verify=verify, go_on=go_on, k=3)
    ssd = Ssd(game=game, fan_out=fan_out, backup=just_in_time, optional_step=True)
    assert_exact_with_hits_and_misses(ssd, 3)


@RULES
@pytest.mark.parametrize("rank", cases([by_law, by_noise], by_noise))
@pytest.mark.parametrize("k", [2, 3])
def test_the_optional_step_after_all_accepted_keeps_the_law(verify, rank, k):
    game = Game(target=toys.TARGET2, draft=toys.DRAFT2, k=k, verify=verify)
    ssd = Ssd(game=game, fan_out=ssd_policies.confidence(3), rank=rank, optional_step=True)
    assert_exact_with_hits_and_misses(ssd, 4)


@RULES
@EVERY_FAN_OUT
def test_what_is_left_of_a_late_speculation_on_the_path_keeps_the_law(verify, fan_out):
    ssd = Ssd(
        game=replace(GAME, verify=verify, k=3),
        fan_out=fan_out,
        optional_step=True,
        late=lambda state: state.round % 2 == 1,
    )
    rounds = sources(ssd, 4)
    assert all(rounds[source] > 0 for source in (HIT, LATE, MISS))


@READ_Q
@EVERY_FAN_OUT
def test_a_late_q_of_a_served_speculation_keeps_the_law(verify, fan_out):
    game = replace(GAME, verify=verify, q_arrives=lambda state: state.round % 2 == 0)
    assert_exact_with_hits_and_misses(Ssd(game=game, fan_out=fan_out), 4)


TARGETS = {
    "ties": toys.TIES3,
    "top-k": then(toys.TARGET3, lambda law: filters.top_k(law, 2)),
    "temperature and top-p": then(
        toys.TIES3,
        lambda law: filters.sharpen(law, 2),
        lambda law: filters.top_p(law, Fraction(3, 5)),
    ),
    "presence penalty": filters.presence(toys.TARGET3, Fraction(1, 4)),
    "bad words": filters.without(toys.TARGET3, ((0, 1), (1, 2, 2))),
}


@RULES
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_truncations_and_penalties_keep_the_law(verify, target):
    game = replace(GAME, target=target, draft=toys.DRAFT3, verify=verify)
    ssd = Ssd(game=game, fan_out=ssd_policies.confidence(2), backup=just_in_time)
    assert_exact_with_hits_and_misses(ssd, 4)


@RULES
@pytest.mark.parametrize("rank", cases([by_law, by_noise], by_noise))
@pytest.mark.parametrize("budget", [3, 5])
def test_rows_that_share_a_budget_stay_independent_and_keep_the_law(verify, rank, budget):
    game = Game(target=toys.TARGET2, draft=toys.DRAFT2, k=2, verify=verify)
    ssd = Ssd(game=game, fan_out=FAN_OUTS["uniform"], rank=rank, optional_step=True)
    step = together(ssd, ssd_policies.shared(budget), 4)
    one, other = (autoregressive(game.target, prompt, 3) for prompt in ((0,), (1,)))
    independent = {(a, b): one[a] * other[b] for a in one for b in other}
    assert emitted_by_batch(step, ((0,), (1,)), 3) == independent


@EVERY_BACKUP
def test_coupled_ssd_is_the_target_alone_token_for_token(backup):
    ssd = Ssd(
        game=replace(GAME, verify=coupled),
        fan_out=FAN_OUTS["confidence"],
        rank=by_noise,
        backup=backup,
        late=lambda state: state.round % 2 == 1,
    )

    def equal(chance: Chance) -> bool:
        state, alone = State(PROMPT), PROMPT
        while len(state.text) < len(PROMPT) + 3:
            state = ssd.round(state, chance)
        while len(alone) < len(state.text):
            alone = (*alone, chance.token(GAME.target(alone), Key(None, len(alone), "token")))
        return state.text == alone

    assert all(result for result, _, _ in paths(equal, frozenset(), lambda _key: True))


def test_ranking_by_noise_hits_more_often():
    plain = Ssd(game=GAME, fan_out=FAN_OUTS["uniform"])
    assert hit_rate(replace(plain, rank=by_noise), 4) > hit_rate(plain, 4)


def test_a_smaller_c_hits_more_often():
    ssd = Ssd(game=GAME, fan_out=ssd_policies.forced(1), optional_step=True)
    rates = [
        hit_rate(replace(ssd, game=replace(GAME, proposal=saguaro(c, (1, 1)))), 4)
        for c in (Fraction(1), HALF, Fraction(0))
    ]
    assert rates[0] < rates[1] < rates[2]
