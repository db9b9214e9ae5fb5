"""What a draft proposes, and the q that is said to be behind it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.noise import gumbel_of
from ssd_jax.sampling import drafting, keys, penalties
from ssd_jax.sampling.confidence import EDGES, GAP_EDGES, SHARED_EDGES, UNKNOWN
from ssd_jax.sampling.confidence_class import class_of_gap, class_of_shared_noise
from ssd_jax.sampling.drafting import Saguaro
from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.reference import slow_probs
from tests.sampling.rows import QUICKLY, greedy_and_sampled, repeated, rows

VOCAB, ROWS = 6, 20_000
LAW = np.array([0.3, 0.05, 0.25, 0.2, 0.15, 0.05])


@functools.partial(
    jax.jit,
    static_argnames=("support", "rule", "candidates", "confident"),
    compiler_options=QUICKLY,
)
def draw(
    logits,
    sampling,
    start,
    step,
    support=VOCAB,
    rule="ratio",
    candidates=0,
    saguaro=None,
    confident=False,
):
    history = penalties.empty(*logits.shape)
    return drafting.draw(
        logits,
        sampling,
        start,
        step,
        lambda: history,
        tokens=VOCAB,
        support=support,
        rule=rule,
        candidates=candidates,
        saguaro=saguaro,
        confident=confident,
    )


def many(settings: dict):
    """Draws for ROWS requests that differ in their number only."""
    sampling = repeated(rows(settings), ROWS)
    sampling = sampling._replace(request=np.arange(ROWS, dtype=np.uint32))
    logits = np.tile(np.log(LAW.astype(np.float32)), (ROWS, 1))
    return logits, sampling, np.zeros(ROWS, np.int32), np.int32(0)


@pytest.mark.parametrize("support", [1, 3, VOCAB, 64])
def test_q_is_the_truncated_law_renormalised(support):
    cases: tuple[dict, ...] = ({}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.7})
    logits = jnp.tile(jnp.log(jnp.asarray(LAW, jnp.float32)), (4, 1))
    batch = draw(logits, rows(*cases), jnp.arange(4), 0, support=support)
    for row, settings in enumerate(cases):
        law = slow_probs(np.log(LAW), **settings)
        best = np.argsort(-law, kind="stable")[:support]
        expected = np.where(np.isin(np.arange(VOCAB), best), law, 0)
        expected /= expected.sum()
        ids, q = np.asarray(batch.support[row]), np.asarray(batch.q[row])
        assert len(ids) == len(q) == min(support, VOCAB)
        np.testing.assert_array_equal(ids == -1, q == 0)
        proposed = ids >= 0
        assert set(ids[proposed]) == set(np.flatnonzero(expected))
        np.testing.assert_allclose(q[proposed], expected[ids[proposed]], rtol=1e-5)
        np.testing.assert_allclose(q.sum(), 1, rtol=1e-6)
        assert int(batch.token[row]) in ids[proposed]


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
@pytest.mark.parametrize("support", [3, VOCAB])
def test_tokens_are_drawn_from_the_very_q_that_is_kept(support, rule):
    drawn = draw(*many({"temperature": 1.3}), support=support, rule=rule)
    ids, q = np.asarray(drawn.support[0]), np.asarray(drawn.q[0], np.float64)
    counts = np.bincount(np.asarray(drawn.token), minlength=VOCAB)
    assert counts.sum() == counts[ids].sum()
    assert p_value(counts[ids], q) > ALPHA
    # The same test tells this q from its neighbour.
    assert p_value(counts[ids], np.roll(q, 1)) <= ALPHA


def test_greedy_rows_and_a_draft_temperature_of_zero_give_point_masses():
    """A row whose draft is greedy holds temperature 0, beside sampled ones."""
    logits = jnp.tile(jnp.log(jnp.asarray(LAW, jnp.float32)), (2, 1))
    for seed in range(20):
        both = rows({"temperature": 0.0, "seed": (seed, 0)}, {"seed": (seed, 0)})
        drawn = draw(logits, both, jnp.array([1, 1]), 0, support=3)
        assert int(drawn.token[0]) == 0
        assert drawn.support[0].tolist() == [0, -1, -1]
        assert drawn.q[0].tolist() == [1, 0, 0]
        assert (np.asarray(drawn.q[1]) > 0).all()


def test_a_coupled_draft_that_is_the_target_draws_the_targets_token():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 2, (500, VOCAB)), jnp.float32)
    start = jnp.arange(500, dtype=jnp.int32)
    settings = repeated(rows({"top_p": 0.9}), 500)
    target = greedy_and_sampled(logits, settings, start + 2, tokens=VOCAB, rule="coupled")
    drawn = draw(logits, settings, start, 2, rule="coupled")
    np.testing.assert_array_equal(drawn.token, target)
    # Under the ratio rule the two have nothing to do with each other.
    alone = draw(logits, settings, start, 2)
    assert (np.asarray(alone.token) != np.asarray(target)).mean() > 0.1


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_noise_depends_on_neither_n_nor_the_row(rule):
    logits, sampling, start, step = many({"top_k": 2})
    full = draw(logits, sampling, start, step, rule=rule)
    sparse = draw(logits, sampling, start, step, support=3, rule=rule)
    np.testing.assert_array_equal(full.token, sparse.token)
    turned = jax.tree.map(lambda a: a[::-1], (logits, sampling))
    back = draw(*turned, start, step, rule=rule)
    np.testing.assert_array_equal(back.token[::-1], full.token)
    assert len(set(full.token.tolist())) == 2


@pytest.mark.parametrize(
    ("rule", "same"), [("ratio", False), ("coupled", True)], ids=["ratio", "coupled"]
)
def test_steps_and_starts_share_noise_under_the_coupled_rule_only(rule, same):
    """Step 1 after start 0 and step 0 after start 1 draw for the same position."""
    logits, sampling, start, _ = many({})
    late = draw(logits, sampling, start, 1, rule=rule).token
    early = draw(logits, sampling, start + 1, 0, rule=rule).token
    assert bool((late == early).all()) is same


SETTINGS = (
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"top_k": 2},
    {"bias_ids": (1, 4), "bias": (4.0, -4.0)},
    {"banned": (2, 3), "ban_before": 9},
)
BEST = ([0, 2, 3, 4], [0, 2, 3, 4], [0, 2, 3, 4], [1, 0, 2, 3], [0, 4, 1, 5])


@pytest.mark.parametrize("size", [VOCAB, 1500])
def test_candidates_are_the_likeliest_allowed_tokens_whatever_temperature_and_filters(size):
    """Ids beyond those that exist are none; and without a draw they are the same."""
    logits = np.full((len(SETTINGS), size), 50.0, np.float32)
    logits[:, :VOCAB] = np.log(LAW)
    start = jnp.arange(len(SETTINGS))
    drawn = draw(logits, rows(*SETTINGS), start, 2, support=3, candidates=VOCAB)
    for row, best in enumerate(BEST):
        assert drawn.candidates[row, :4].tolist() == best
    # What cannot be said is no candidate; a bias of ids beyond the vocabulary is none.
    forbidden = [6 - int((row == -1).sum()) for row in np.asarray(drawn.candidates)]
    assert forbidden == [6, 6, 6, 6, 4]
    alone = jax.jit(
        lambda logits, sampling, position: drafting.candidates(
            logits,
            sampling,
            position,
            lambda: penalties.empty(*logits.shape),
            tokens=VOCAB,
            count=VOCAB,
        ),
        compiler_options=QUICKLY,
    )(logits, rows(*SETTINGS), start + 3)
    np.testing.assert_array_equal(alone, drawn.candidates)


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_asking_for_candidates_changes_no_draw(rule):
    logits, sampling, start, step = many({"temperature": 0.9})
    sampling.temperature[::3] = 0.0
    plain = draw(logits, sampling, start, step, support=3, rule=rule)
    more = draw(logits, sampling, start, step, support=3, rule=rule, candidates=4)
    for one, other in zip(plain[:3], more[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    assert (np.asarray(more.token)[::3] == 0).all()
    assert plain.candidates.shape == (ROWS, 0)


def lowered(q: np.ndarray, ids, d: int, c: float) -> np.ndarray:
    """q with its best d tokens of `LAW` multiplied by C, normalised."""
    best = np.argsort(-LAW, kind="stable")[:d]
    q = np.where(np.isin(ids, best), c * q, q)
    return q / q.sum()


@pytest.mark.parametrize("c", [0.0, 0.4])
@pytest.mark.parametrize("support", [4, VOCAB])
def test_saguaro_tokens_are_drawn_from_the_lowered_q_that_is_kept(support, c):
    """Truncated and renormalised first; the noise of the row decides the token only, never q."""
    logits, sampling, start, step = many({"temperature": 1.3})
    plain = draw(logits, sampling, start, step, support=support)
    drawn = draw(
        *(logits, sampling, start, step),
        support=support,
        candidates=VOCAB,
        saguaro=Saguaro(c, jnp.array(2)),
    )
    q = np.asarray(drawn.q, np.float64)
    assert (q == q[0]).all()
    ids = np.asarray(plain.support[0])
    expected = lowered(np.asarray(plain.q[0], np.float64), ids, 2, c)
    np.testing.assert_array_equal(drawn.support[0], np.where(expected > 0, ids, -1))
    np.testing.assert_allclose(q[0], expected, rtol=1e-5)
    counts = np.bincount(np.asarray(drawn.token), minlength=VOCAB)[ids]
    assert counts.sum() == ROWS
    assert p_value(counts, q[0]) > ALPHA
    # The same test tells this law from the one before it was lowered.
    assert p_value(counts, np.asarray(plain.q[0], np.float64)) <= ALPHA


def test_saguaro_leaves_greedy_rows_and_laws_that_it_would_cover_alone():
    """D may differ from row to row; the set is of the draft's logits, also where filters differ."""
    settings = ({"temperature": 0.0}, {"top_k": 2}, {"top_k": 3}, {}, {})
    logits = jnp.tile(jnp.log(jnp.asarray(LAW, jnp.float32)), (5, 1))
    d = jnp.array([2, 2, 2, 0, VOCAB])
    drawn = draw(logits, rows(*settings), jnp.arange(5), 0, candidates=6, saguaro=Saguaro(0.0, d))
    plain = draw(logits, rows(*settings), jnp.arange(5), 0)
    for row in (0, 1, 4):
        np.testing.assert_array_equal(drawn.q[row], plain.q[row])
        np.testing.assert_array_equal(drawn.support[row], plain.support[row])
        assert drawn.token[row] == plain.token[row]
    np.testing.assert_allclose(drawn.q[2], [0, 0, 0, 1, 0, 0], atol=1e-7)  # of 0, 2 and 3
    np.testing.assert_allclose(drawn.q[3], plain.q[3], rtol=1e-6)


@pytest.mark.parametrize("support", [3, VOCAB])
@pytest.mark.parametrize("lowered", [None, 2])
def test_confidence_is_the_class_of_the_probability_before_saguaro_sampling(support, lowered):
    settings = {"temperature": 0.6, "top_k": 4}
    saguaro = None if lowered is None else Saguaro(0.25, jnp.array(lowered))
    drawn = draw(*many(settings), support=support, candidates=3, saguaro=saguaro, confident=True)
    law = slow_probs(np.log(LAW), **settings)
    law = np.where(law >= np.sort(law)[-support], law, 0)
    law /= law.sum()
    expected = np.searchsorted(EDGES, law, side="right")
    tokens = np.asarray(drawn.token)
    assert len(set(expected[np.unique(tokens)])) > 1
    np.testing.assert_array_equal(drawn.confidence, expected[tokens])


@pytest.mark.parametrize("rule", ["ratio", "coupled"])
def test_greedy_confidence_is_that_of_the_whole_law_at_temperature_1(rule):
    """The proposal itself is a point mass, whatever the draft thinks of it."""
    shapes = [LAW, LAW**4 / (LAW**4).sum(), np.eye(VOCAB)[2] * 0.9 + 0.1 / VOCAB]
    logits = jnp.log(jnp.asarray(np.array(shapes), jnp.float32)) + 3
    greedy = rows(*[{"temperature": 0.0}] * 3)
    drawn = draw(logits, greedy, jnp.arange(3), 0, support=2, rule=rule, confident=True)
    expected = np.searchsorted(EDGES, [law.max() for law in shapes], side="right")
    assert len(set(expected)) == 3
    np.testing.assert_array_equal(drawn.confidence, expected)


@pytest.mark.parametrize("support", [1, 3, VOCAB])
def test_where_the_targets_noise_draws_the_gap_of_the_two_best_scores_adds_to_the_log_odds(support):
    settings = {"temperature": 0.6}
    drawn = draw(*many(settings), support=support, rule="coupled", confident=True)
    _, sampling, *_ = many(settings)
    ids = np.argsort(-LAW, kind="stable")[:support]
    law = slow_probs(np.log(LAW), **settings)[ids]
    law /= law.sum()
    at = jnp.ones(ROWS, jnp.int32)
    key = keys.derive(sampling.seed, sampling.request, 0 * at, at, keys.Purpose.TOKEN)
    noise = np.asarray(gumbel_of(key, jnp.broadcast_to(jnp.asarray(ids), (ROWS, support))))
    scores = np.log(law) + noise
    expected = np.full(ROWS, len(SHARED_EDGES))
    if support > 1:
        q, best = law[scores.argmax(axis=1)], -np.sort(-scores, axis=1)
        value = np.log(q / (1 - q)) + best[:, 0] - best[:, 1]
        expected = np.searchsorted(SHARED_EDGES, value, side="right")
        assert len(set(expected)) >= len(SHARED_EDGES) - 1
        is_clear = np.abs(value[:, None] - np.array(SHARED_EDGES)).min(axis=1) > 1e-4
        expected = np.where(is_clear, expected, drawn.confidence)
    np.testing.assert_array_equal(drawn.confidence, expected)


def test_a_row_in_which_nothing_is_possible_has_the_class_of_no_confidence():
    nothing, alone = jnp.full((1, 2), -jnp.inf), jnp.array([[0.5, -jnp.inf], [jnp.nan, jnp.nan]])
    assert class_of_gap(nothing).tolist() == [0]
    assert class_of_gap(alone).tolist() == [len(GAP_EDGES), 0]
    assert class_of_shared_noise(alone, jnp.ones(2)).tolist() == [len(SHARED_EDGES), 0]


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_where_the_drafts_own_noise_draws_its_gap_is_no_confidence(rule):
    """Tokens of one probability have one class, whatever the noise that drew them."""
    law = np.full((ROWS, VOCAB), np.log(1 / VOCAB), np.float32)
    _, *others = many({})
    drawn = draw(law, *others, rule=rule, confident=True)
    assert set(np.asarray(drawn.confidence).tolist()) == {1}  # 1/6 lies between .1 and .25
    assert len(set(np.asarray(drawn.token).tolist())) == VOCAB


def test_confidence_is_unknown_where_it_was_not_asked_for():
    drawn = draw(*many({"temperature": 0.6}), support=3)
    assert (np.asarray(drawn.confidence) == UNKNOWN).all()


@pytest.mark.parametrize("candidates", [0, 3])
def test_what_a_greedy_draft_proposes_is_an_id_even_where_its_logits_are_no_numbers(candidates):
    logits, start = np.full((1, VOCAB), np.nan, np.float32), np.zeros(1, np.int32)
    greedy = rows({"temperature": 0})
    drawn = draw(logits, greedy, start, np.int32(0), support=4, candidates=candidates)
    assert drawn.token[0] >= 0
    assert drawn.support[0].tolist() == [int(drawn.token[0]), -1, -1, -1]
