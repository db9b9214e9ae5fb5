"""What a draft proposes, and the q that is said to be behind it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.speculation import drafting, history
from tests.speculation.evidence import ALPHA, p_value
from tests.speculation.reference import slow_probs
from tests.speculation.rows import QUICKLY, greedy_and_sampled, rows

VOCAB, ROWS = 6, 20_000
LAW = np.array([0.3, 0.05, 0.25, 0.2, 0.15, 0.05])


@functools.partial(jax.jit, static_argnames=("support", "rule"), compiler_options=QUICKLY)
def draw(logits, sampling, start, step, support=VOCAB, rule="ratio"):
    said = history.empty(*logits.shape)
    return drafting.draw(
        logits, sampling, start, step, lambda: said, tokens=VOCAB, support=support, rule=rule
    )


def many(settings: dict):
    """Draws for ROWS requests that differ in their number only."""
    sampling = jax.tree.map(lambda a: jnp.repeat(a, ROWS, axis=0), rows(settings))
    sampling = sampling._replace(request=jnp.arange(ROWS, dtype=jnp.uint32))
    logits = jnp.tile(jnp.log(jnp.asarray(LAW, jnp.float32)), (ROWS, 1))
    return logits, sampling, jnp.zeros(ROWS, jnp.int32), jnp.array(0)


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
        kept = ids >= 0
        assert set(ids[kept]) == set(np.flatnonzero(expected))
        np.testing.assert_allclose(q[kept], expected[ids[kept]], rtol=1e-5)
        np.testing.assert_allclose(q.sum(), 1, rtol=1e-6)
        assert int(batch.token[row]) in ids[kept]


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
    settings = jax.tree.map(lambda a: jnp.repeat(a, 500, axis=0), rows({"top_p": 0.9}))
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
