"""Verification keeps the target's law, whatever is proposed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling import penalties
from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.proposal import Proposal, as_point_mass_where
from ssd_jax.sampling.rules import RULES
from ssd_jax.sampling.variants import VARIANTS
from ssd_jax.sampling.verification import commit
from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.rows import empty_history, point_mass, repeated, rows, verify

VOCAB, K, ROWS = 4, 2, 60_000
READ_Q = [name for name, rule in RULES.items() if rule.ships_q]
# Row t is the target's (draft's) distribution of the token after t.
TARGET = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
DRAFT = np.array([[0.2, 0.2, 0.1, 0.5], [0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 0.5, 0.5], [0.25] * 4])


def many(settings: dict, count: int = ROWS):
    return repeated(rows(settings), count)


def logits_after(tokens: np.ndarray) -> np.ndarray:
    """Target logits [B, K + 1, V] after the pending token 0 and the proposed ones."""
    before = np.concatenate([np.zeros((len(tokens), 1), int), tokens], axis=1)
    with np.errstate(divide="ignore"):
        return np.log(TARGET)[before].astype(np.float32)


def draw(rng, law: np.ndarray) -> np.ndarray:
    """One draw for each row of law [B, V]."""
    u = rng.random((len(law), 1))
    return np.minimum((u > np.cumsum(law, axis=1)).sum(axis=1), VOCAB - 1)


def drafted(rng, count: int = ROWS) -> Proposal:
    """Proposals drawn from DRAFT, with the q they were drawn from."""
    first = draw(rng, np.repeat(DRAFT[:1], count, axis=0))
    second = draw(rng, DRAFT[first])
    q = np.stack([np.repeat(DRAFT[:1], count, axis=0), DRAFT[first]], axis=1)
    ids = np.broadcast_to(np.arange(VOCAB), q.shape)
    tokens = np.stack([first, second], axis=1)
    return Proposal(
        tokens.astype(np.int32),
        np.full(count, K, np.int32),
        ids.astype(np.int32),
        q.astype(np.float32),
    )


def emitted_pairs(rng, proposal: Proposal, rule: str, settings=None) -> np.ndarray:
    """The first two tokens of each row; a second one that was not emitted comes from the target."""
    count = proposal.tokens.shape[0]
    tokens = np.asarray(proposal.tokens)
    outcome = verify(
        logits_after(tokens),
        proposal,
        many(settings or {"temperature": 1.0}, count),
        np.arange(count, dtype=np.int32) * 8,  # every row has its own keys
        empty_history(count, VOCAB),
        tokens=VOCAB,
        rule=rule,
    )
    accepted, bonus = np.asarray(outcome.accepted), np.asarray(outcome.bonus)
    first = np.where(accepted >= 1, tokens[:, 0], bonus)
    second = np.where(accepted >= 2, tokens[:, 1], bonus)
    second = np.where(accepted >= 1, second, draw(rng, TARGET[first]))
    return np.stack([first, second], axis=1)


def assert_follows_target(pairs: np.ndarray) -> None:
    observed = np.zeros((VOCAB, VOCAB))
    np.add.at(observed, tuple(pairs.T), 1)
    assert p_value(observed, TARGET[0][:, None] * TARGET) > ALPHA


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["drafted", "point mass", "mixed", "shorter", "none"])
def test_the_emitted_law_is_the_target(rule, kind):
    rng = np.random.default_rng(1)
    proposal = drafted(rng)
    half = jnp.arange(ROWS) % 2 == 0
    if kind == "point mass":
        proposal = point_mass(jnp.full((ROWS, K), 1, jnp.int32), jnp.full(ROWS, K, jnp.int32))
    if kind == "mixed":  # the q of every second row came too late
        proposal = as_point_mass_where(proposal, half)
    if kind == "shorter":
        proposal = proposal._replace(length=jnp.where(half, 1, 0).astype(jnp.int32))
    if kind == "none":
        proposal = proposal._replace(length=jnp.zeros(ROWS, jnp.int32))
    assert_follows_target(emitted_pairs(rng, proposal, rule))


@pytest.mark.parametrize("rule", READ_Q)
def test_a_wrong_q_is_caught_by_this_test(rule):
    rng = np.random.default_rng(1)
    proposal = drafted(rng)
    wrong = proposal._replace(q=jnp.full_like(proposal.q, 1 / VOCAB))
    with pytest.raises(AssertionError):
        assert_follows_target(emitted_pairs(rng, wrong, rule))


@pytest.mark.parametrize("rule", READ_Q)
def test_more_is_accepted_when_the_draft_is_the_target(rule):
    rng = np.random.default_rng(2)
    proposal = drafted(rng, 2000)
    same = proposal._replace(q=jax.nn.softmax(logits_after(np.asarray(proposal.tokens))[:, :K]))
    # u * q < p holds for every u < 1 when p = q, and rounding may not spoil it.
    outcome = verify(
        logits_after(np.asarray(same.tokens)),
        same,
        many({"temperature": 1.0}, 2000),
        jnp.arange(2000, dtype=jnp.int32),
        empty_history(2000, VOCAB),
        tokens=VOCAB,
        rule=rule,
    )
    possible = TARGET[0][np.asarray(same.tokens)[:, 0]] > 0
    assert (np.asarray(outcome.accepted)[possible] >= 1).all()


@pytest.mark.parametrize("rule", READ_Q)
def test_an_empty_residual_draws_from_p(rule):
    """q above p everywhere it counts, as rounding can make it: nothing of max(p - q, 0) is left."""
    logits = jnp.log(jnp.array([[[1.0, 0.0]] * 2]))
    proposal = Proposal(
        tokens=jnp.array([[1]]),  # probability zero: rejected
        length=jnp.array([1]),
        support=jnp.array([[[0, 1]]]),
        q=jnp.array([[[1.0, 1e-9]]]),
    )
    outcome = verify(
        logits, proposal, rows({}), jnp.array([3]), empty_history(1, 2), tokens=2, rule=rule
    )
    assert (int(outcome.accepted[0]), int(outcome.bonus[0])) == (0, 0)


@pytest.mark.parametrize("rule", list(RULES))
def test_greedy_rows_accept_what_the_target_would_say(rule):
    tokens = np.array([[0, 0], [0, 1], [1, 3], [2, 2]])  # the target says 0, then 0
    outcome = verify(
        logits_after(tokens),
        point_mass(jnp.asarray(tokens, jnp.int32), jnp.full(4, K, jnp.int32)),
        many({"temperature": 0.0}, 4),
        jnp.zeros(4, jnp.int32),
        empty_history(4, VOCAB),
        tokens=VOCAB,
        rule=rule,
    )
    assert outcome.accepted.tolist() == [2, 1, 0, 0]
    assert outcome.bonus.tolist() == [0, 0, 0, 0]


def test_coupled_text_does_not_depend_on_the_proposals():
    """One token at a time, or two at once with any proposal: the same text, key by position."""
    settings = many({"temperature": 1.0, "seed": (5, 0)}, 500)
    starts = jnp.arange(500, dtype=jnp.int32) * 8

    def run(proposed: np.ndarray, length: int, start):
        return verify(
            logits_after(proposed)[:, : length + 1],
            point_mass(jnp.asarray(proposed[:, :length], jnp.int32), jnp.full(500, length)),
            settings,
            start,
            empty_history(500, VOCAB),
            tokens=VOCAB,
            rule="coupled",
        )

    nothing = np.zeros((500, K), int)
    alone = np.asarray(run(nothing, 0, starts).bonus)
    for guess in range(VOCAB):
        outcome = run(np.full((500, K), guess), K, starts)
        first = np.where(np.asarray(outcome.accepted) >= 1, guess, np.asarray(outcome.bonus))
        np.testing.assert_array_equal(first, alone)


def test_rows_in_flight_see_the_proposed_tokens_in_their_penalties():
    """The presence penalty forbids what was said: in flight it must count like committed text."""
    logits = jnp.zeros((1, 3, VOCAB)).at[..., 1].set(1.0)  # always prefers token 1
    settings = rows({"temperature": 0.0, "presence_penalty": 5.0})
    proposal = point_mass(jnp.array([[1, 1]]), jnp.array([2]))
    history = penalties.empty(1, VOCAB)
    outcome = verify(logits, proposal, settings, jnp.array([0]), history, tokens=VOCAB)
    # Row 0 says 1; row 1 has 1 in flight, so the second 1 is refused.
    assert (int(outcome.accepted[0]), int(outcome.bonus[0])) == (1, 0)
    after = commit(history, proposal, outcome, jnp.array([True]))
    assert after.output.tolist() == [[1, 1, 0, 0]]
    idle = commit(history, proposal, outcome, jnp.array([False]))
    assert idle.output.tolist() == [[0, 0, 0, 0]]


def test_min_tokens_ends_within_a_block():
    logits = jnp.zeros((1, 3, VOCAB)).at[..., 2].set(9.0)
    settings = rows({"temperature": 0.0, "banned": (2, -1), "ban_before": 12})
    proposal = point_mass(jnp.array([[0, 2]]), jnp.array([2]))
    outcome = verify(
        logits, proposal, settings, jnp.array([10]), empty_history(1, VOCAB), tokens=VOCAB
    )
    # Position 11 may not be 2; position 12 may.
    assert (int(outcome.accepted[0]), int(outcome.bonus[0])) == (2, 2)


@pytest.mark.parametrize(
    ("variant", "temperature"),
    [(v, t) for v in VARIANTS for t in (0.0, 1.0) if VARIANTS[v].sampled is not False or not t],
)
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("stays", [True, False])
def test_where_the_targets_logits_are_no_numbers_no_token_is_drawn(
    variant, rule, temperature, stays
):
    """NaN alone, among numbers, infinity, nothing but -inf; from some position on, as keys and
    values keep it, or in one alone, as the head may have it. Other rows have their tokens."""
    count = 60
    tokens = np.tile(np.array([[0, 0]], np.int32), (count, 1))
    logits = np.zeros((count, K + 1, VOCAB + 1), np.float32)
    logits[..., 0] = 1.0
    logits[..., VOCAB] = np.nan  # no token has this id
    bad = {1: np.nan, 2: np.inf}
    logits[0::4] = np.nan
    for kind, value in bad.items():
        logits[kind::4, kind : None if stays else kind + 1, 1] = value
    empty = logits[2::8]
    empty[(empty == np.inf).any(axis=-1)] = -np.inf
    outcome = verify(
        logits,
        point_mass(tokens, np.full(count, K, np.int32)),
        many({"temperature": temperature}, count),
        np.arange(count, dtype=np.int32) * 8,
        empty_history(count, VOCAB + 1),
        tokens=VOCAB,
        rule=rule,
        parts=VARIANTS[variant],
    )
    accepted, bonus = np.asarray(outcome.accepted), np.asarray(outcome.bonus)
    first_bad = np.tile([0, 1, 2, K + 1], count // 4)
    assert (accepted <= first_bad).all()
    np.testing.assert_array_equal(bonus == NO_TOKEN, accepted == first_bad)
    assert {*first_bad[bonus == NO_TOKEN]} == {0, 1, 2}
    assert ((bonus >= 0) & (bonus < VOCAB))[accepted < first_bad].all()


@pytest.mark.parametrize("variant", ["any", "sampled", "truncated", "full"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rule", READ_Q)
def test_q_that_is_no_number_leaves_the_targets_law(variant, known, rule):
    """Its tokens are rejected, whether or not its support has them, and the bonus token is drawn
    from p."""
    tokens = np.random.default_rng(0).integers(0, 2, (ROWS, K)).astype(np.int32)
    support = np.broadcast_to(np.arange(2, dtype=np.int32), (ROWS, K, 2))  # not all that p has
    length = np.full(ROWS, K, np.int32)
    support = support if known else np.full_like(support, -1)
    outcome = verify(
        logits_after(tokens),
        Proposal(tokens, length, support, np.full(support.shape, np.nan, np.float32)),
        many({"temperature": 1.0}),
        np.arange(ROWS, dtype=np.int32) * 8,
        empty_history(ROWS, VOCAB),
        tokens=VOCAB,
        rule=rule,
        parts=VARIANTS[variant],
    )
    assert not np.asarray(outcome.accepted).any()
    observed = np.bincount(np.asarray(outcome.bonus), minlength=VOCAB)
    assert p_value(observed, TARGET[0]) > ALPHA
