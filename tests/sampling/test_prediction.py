"""Noise-aware prediction names the bonus tokens that verification draws, while p is q."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling import keys, penalties, prediction
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import sampling_of
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import slow_probs
from tests.sampling.rows import QUICKLY, point_mass, rows, verify

ROWS, K, VOCAB, TOKENS, W = 60, 2, 23, 20, 6
RULES = pytest.mark.parametrize("rule", ["ratio", "block", "coupled"])
SETTINGS = ({}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.8, "seed": (7, 1)})


def case():
    """Logits [rows, K + 1, V] at three places, settings, starts."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(3 * rng.standard_normal((ROWS, K + 1, VOCAB)), jnp.float32)
    sampling = rows(*(SETTINGS[row % 3] | {"request": row} for row in range(ROWS)))
    return logits, sampling, jnp.asarray(rng.integers(0, 1000, ROWS), jnp.int32)


def foreseen(logits, sampling, start, rule):
    """Ranked candidates [rows, K + 1, W] after 0..K accepted tokens."""
    row = jnp.repeat(jnp.arange(ROWS), K + 1)
    before = jnp.tile(jnp.arange(K + 1), ROWS)
    flat = logits.reshape(-1, VOCAB)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def ranked():
        return prediction.predict_bonus(
            flat,
            sampling_of(sampling, row),
            start[row],
            before,
            lambda: penalties.empty(*flat.shape),
            tokens=TOKENS,
            count=W,
            rule=rule,
        )

    return np.asarray(ranked()).reshape(ROWS, K + 1, W)


def laws(logits):
    """What is drawn from at each place [rows, K + 1, V]."""
    law = np.zeros(logits.shape)
    for row, settings in enumerate(SETTINGS * (ROWS // 3)):
        plain = {name: value for name, value in settings.items() if name != "seed"}
        for place in range(K + 1):
            law[row, place, :TOKENS] = slow_probs(np.asarray(logits)[row, place, :TOKENS], **plain)
    return law


def outcomes(logits, proposal, sampling, start, rule):
    history = penalties.empty(ROWS, VOCAB)
    return verify(logits, proposal, sampling, start, history, tokens=TOKENS, rule=rule)


def judged_alike(rule):
    """Bonus tokens after 0..K accepted tokens of a draft that is the target, and those foreseen."""
    logits, sampling, start = case()
    expected = foreseen(logits, sampling, start, rule)
    length = jnp.arange(ROWS, dtype=jnp.int32) % (K + 1)
    tokens = jnp.asarray(expected[:, :K, 0])
    law = jnp.asarray(laws(logits)[:, :K], jnp.float32) / 2  # half of p: always accepted
    ids = jnp.broadcast_to(jnp.arange(VOCAB), law.shape)
    outcome = outcomes(logits, Proposal(tokens, length, ids, law), sampling, start, rule)
    np.testing.assert_array_equal(outcome.accepted, length)
    return np.asarray(outcome.bonus), expected[np.arange(ROWS), np.asarray(length), 0]


@RULES
def test_the_first_candidate_is_the_bonus_token_after_any_number_of_accepted_ones(rule):
    drawn, first = judged_alike(rule)
    np.testing.assert_array_equal(drawn, first)


@RULES
def test_after_a_rejection_it_is_the_first_candidate_but_the_rejected_one(rule):
    logits, sampling, start = case()
    expected = foreseen(logits, sampling, start, rule)
    # As a point mass: its residual is p without it. Under the coupled rule another token is drawn.
    tried = expected[:, :K, 1 if rule == "coupled" else 0]
    length = jnp.ones(ROWS, jnp.int32)
    outcome = outcomes(logits, point_mass(jnp.asarray(tried), length), sampling, start, rule)
    rejected = np.asarray(outcome.accepted) == 0
    assert rejected.sum() > ROWS / 5
    others = [[c for c in row[0] if c != x] for row, x in zip(expected, tried[:, 0], strict=True)]
    drawn = np.asarray(outcome.bonus)[rejected]
    np.testing.assert_array_equal(drawn, np.array([other[0] for other in others])[rejected])


@RULES
def test_candidates_are_in_the_order_of_log_q_and_noise_and_others_follow_by_law(rule):
    logits, sampling, start = case()
    found, law = foreseen(logits, sampling, start, rule), laws(logits)
    for place in range(K + 1):
        at = start + 1 + place
        key_parts = (
            (start * 0, at, Purpose.TOKEN) if rule == "coupled" else (start, at, Purpose.BONUS)
        )
        noise = np.asarray(
            keys.gumbel(keys.derive(sampling.seed, sampling.request, *key_parts), VOCAB)
        )
        for row in range(ROWS):
            p, ids = law[row, place], found[row, place]
            with np.errstate(divide="ignore"):
                inside = np.argsort(-(np.log(p) + noise[row]))[: np.count_nonzero(p)]
            outside = [t for t in np.argsort(-np.asarray(logits)[row, place, :TOKENS]) if not p[t]]
            np.testing.assert_array_equal(ids, [*inside, *outside][:W])


def test_no_token_is_named_where_no_more_are_allowed():
    logits, sampling, start = case()
    sampling = sampling._replace(
        banned=jnp.tile(jnp.arange(TOKENS - 2), (ROWS, 1)), ban_before=start + 100
    )
    found = foreseen(logits, sampling, start, "ratio")
    assert (np.sort(found, axis=-1) == [-1, -1, -1, -1, TOKENS - 2, TOKENS - 1]).all()


FAULTS = {
    "the start is not in the key": ("(start, position,", "(start * 0, position,"),
    "the step for the position": ("(start, position,", "(start, accepted,"),
    "the noise of the acceptance": ("Purpose.BONUS", "Purpose.ACCEPT"),
    "one position off": ("position = start + 1 + accepted", "position = start + accepted"),
    "the law before its filters": ("jnp.where(p > 0, perturbed, impossible)", "allowed"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_planted_faults_of_predictions_are_caught(fault):
    with edited([Edit(prediction, "predict_bonus", *fault)]):
        drawn, first = judged_alike("ratio")
    assert (drawn != first).any()


@pytest.mark.parametrize(
    "fault",
    [("jnp.zeros_like(position), position", "start, position"), ("Purpose.TOKEN", "Purpose.BONUS")],
)
def test_faults_of_the_coupled_rule_are_caught(fault):
    logits, sampling, start = case()
    expected = foreseen(logits, sampling, start, "coupled")
    with edited([Edit(prediction, "predict_bonus", *fault)]):
        assert (foreseen(logits, sampling, start, "coupled") != expected).any()
