"""Laws of real vocabularies: what looks at a few blocks of ids first says what all of them say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import distribution, noise
from ssd_jax.kernels.rows import row_sum
from ssd_jax.sampling import keys, penalties, verification
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import slow_probs
from tests.sampling.rows import QUICKLY, rows

BLOCK = 128
WIDE = 50_000


def key_of(count, seed=0):
    requests = jnp.arange(count, dtype=jnp.uint32)
    seeds = jnp.tile(jnp.array([[seed, 0]], jnp.uint32), (count, 1))
    nothing = jnp.zeros(count, jnp.int32)
    return keys.derive(seeds, requests, nothing, nothing, Purpose.BONUS)


def in_blocks(blocks, rng, vocab=WIDE):
    """Weights [V] in so many blocks. The one with the least maximum has a large share of them."""
    weights = np.zeros(vocab, np.float32)
    flat, *others = rng.choice(vocab // BLOCK, blocks, replace=False)
    for block in others:
        weights[block * BLOCK + rng.choice([0, 5, 99, BLOCK - 1])] = rng.uniform(0.5, 1)
    weights[flat * BLOCK : (flat + 1) * BLOCK] = 0.4
    return weights


BLOCKS = [60, 64, 65, 66, 100, 128, 129]


def drawn(blocks, draw):
    """Tokens of 16 laws, and those that the noise of all ids gives."""
    rng = np.random.default_rng(blocks)
    weights = jnp.asarray(np.stack([in_blocks(blocks, rng) for _ in range(16)]))
    key = key_of(16, blocks)
    expected = jnp.argmax(jnp.log(weights) + keys.gumbel(key, WIDE), axis=-1)
    return np.asarray(draw(weights, key)), np.asarray(expected)


@pytest.fixture(scope="module")
def gumbel_max():
    return jax.jit(noise.gumbel_max, compiler_options=QUICKLY)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_laws_of_few_and_of_many_blocks_give_the_token_of_the_noise(gumbel_max, blocks):
    found, expected = drawn(blocks, gumbel_max)
    np.testing.assert_array_equal(found, expected)


FEW_TAKEN_FOR_MANY = Edit(noise, "gumbel_max", "axis=-1) <= _BLOCKS)", "axis=-1) <= 2 * _BLOCKS)")


def test_few_blocks_taken_for_more_than_are_looked_at_are_caught():
    with edited([FEW_TAKEN_FOR_MANY]):
        draw = jax.jit(noise.gumbel_max, compiler_options=QUICKLY)
        caught = [not np.array_equal(*drawn(blocks, draw)) for blocks in BLOCKS]
    assert caught == [64 < blocks <= 128 for blocks in BLOCKS]


WIDER = 70_000


def spread(count, rng, vocab=WIDER):
    """Logits [V] whose `kept` likeliest ids are in a block each, some at its end."""
    logits = rng.normal(-8, 1, vocab).astype(np.float32)
    block = rng.choice(vocab // BLOCK, count, replace=False)
    logits[block * BLOCK + rng.choice([0, 64, BLOCK - 1], count)] = np.sort(
        rng.normal(3, 0.5, count)
    )
    return logits


@pytest.fixture(scope="module")
def laws():
    """All rows at once, as on an accelerator."""
    return jax.jit(distribution.sampled_probs, compiler_options=QUICKLY)


@pytest.mark.parametrize("count", [63, 64, 65, 255, 256, 257])
def test_thresholds_at_the_last_block_that_is_looked_at(laws, count):
    rng = np.random.default_rng(count)
    logits = np.stack([spread(count, rng) for _ in range(3)])
    ordered = np.sort(slow_probs(logits[1]))[::-1]
    mass = float(ordered[: count - 1].sum() + ordered[count - 1] / 2)  # reached by the last of them
    settings = [{"top_k": count}, {"top_p": mass}, {"top_k": count + 1, "min_p": 0.01}]
    got = np.asarray(laws(logits, rows(*settings)))
    for row, (row_logits, setting) in enumerate(zip(logits, settings, strict=True)):
        expected = slow_probs(row_logits, **setting)
        np.testing.assert_array_equal(got[row] > 0, expected > 0, err_msg=str(setting))
        np.testing.assert_allclose(got[row], expected, rtol=2e-5, atol=1e-7)


def on_the_edge():
    """A law [V], and a top-p that its likeliest tokens reach in one of two orders of adding up."""

    @jax.jit
    def both(p, low):
        maxima = p[: WIDER // BLOCK * BLOCK].reshape(-1, BLOCK).max(axis=1)
        block = jax.lax.top_k(maxima, 65)[1][:64]
        head = (block[:, None] * BLOCK + jnp.arange(BLOCK)).reshape(1, -1)
        filtered = jnp.where(p >= low, p, 0.0)
        return row_sum(filtered[head])[0, 0], row_sum(filtered[None])[0, 0]

    rng = np.random.default_rng(0)
    for _ in range(50):
        logits = spread(60, rng)
        p = np.asarray(slow_probs(logits), np.float32)
        for low in np.sort(p)[::-1][20:60]:
            few, every = both(p, low)
            if few > every:
                return p, float(few)
    raise AssertionError("both orders always give the same")


def test_a_rows_threshold_is_the_same_beside_any_neighbour():
    """A flat neighbour has to be looked at further; what the row keeps does not change with it."""
    p, top_p = on_the_edge()
    filtered = jax.jit(distribution.truncate, compiler_options=QUICKLY)
    settings = rows({"top_p": top_p}, {"top_p": 0.95})
    sharp = np.zeros(WIDER, np.float32)
    sharp[7] = 1
    flat = np.full(WIDER, 1 / WIDER, np.float32)
    beside = [np.asarray(filtered(np.stack([p, other]), settings)) for other in (sharp, flat)]
    np.testing.assert_array_equal(beside[0][0], beside[1][0])
    assert (beside[1][1] > 0).all()


SETTINGS = [{"top_k": 100}, {"top_p": 0.9}, {"temperature": 0.8, "min_p": 0.02}, {}]
ROUNDS = 24


def rounds(vocab):
    """Logits [B, 2, V], proposals of one token, drafted and point masses, and their settings."""
    rng = np.random.default_rng(vocab)
    chosen = rng.choice(BLOCKS, (ROUNDS, 2)).tolist()
    chosen = [[min(count, vocab // BLOCK) for count in pair] for pair in chosen]
    logits = np.stack([[spread(count, rng, vocab) for count in pair] for pair in chosen])
    support, q = np.full((ROUNDS, 1, 64), -1), np.zeros((ROUNDS, 1, 64))
    tokens = np.zeros((ROUNDS, 1), int)
    for row in range(ROUNDS):
        likely = np.argsort(-logits[row, 0])[:64]
        if row % 3:
            weights = rng.random(64)
            support[row, 0], q[row, 0] = likely, weights / weights.sum()
            tokens[row] = likely[rng.choice(64, p=q[row, 0])]
        else:
            tokens[row] = support[row, 0, 0] = likely[rng.integers(3)]
            q[row, 0, 0] = 1
    proposal = Proposal(
        tokens.astype(np.int32),
        np.ones(ROUNDS, np.int32),
        support.astype(np.int32),
        q.astype(np.float32),
    )
    return logits, proposal, [SETTINGS[row % len(SETTINGS)] for row in range(ROUNDS)]


def slow_outcomes(logits, proposal, settings):
    """(k, t*) of each row by the slow law, drawn by the same noise."""
    vocab, found = logits.shape[-1], []
    for row, setting in enumerate(settings):

        def key(position, purpose, row=row):
            at = (jnp.array([value], jnp.int32) for value in (row, position))
            return keys.derive(
                jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.uint32), *at, purpose
            )

        first, after = (slow_probs(logit, **setting) for logit in logits[row])
        support, token = proposal.support[row, 0], proposal.tokens[row, 0]
        q = np.zeros(vocab)
        q[support[support >= 0]] = proposal.q[row, 0][support >= 0]
        accepted = int(
            float(keys.uniform(key(row + 1, Purpose.ACCEPT))[0]) * q[token] < first[token]
        )
        weights = after if accepted else np.maximum(first - q, 0)
        noise = np.asarray(keys.gumbel(key(row + 1 + accepted, Purpose.BONUS), vocab)[0])
        with np.errstate(divide="ignore"):
            found.append((accepted, int(np.argmax(np.log(weights) + noise))))
    return found


def outcomes(logits, proposal, settings):
    """The same by the code, compiled from what its functions are now."""
    vocab = logits.shape[-1]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def compiled(logits, proposal, sampling, start, history):
        return verification.verify(logits, proposal, sampling, start, history, tokens=vocab)

    outcome = compiled(
        logits,
        proposal,
        rows(*settings),
        np.arange(ROUNDS, dtype=np.int32),
        penalties.empty(ROUNDS, vocab),
    )
    return list(zip(outcome.accepted.tolist(), outcome.bonus.tolist(), strict=True))


@pytest.mark.more
@pytest.mark.parametrize("vocab", [16_384, 50_000])
def test_verifications_are_those_of_the_slow_law(vocab):
    round_ = rounds(vocab)
    expected = slow_outcomes(*round_)
    assert 4 < sum(accepted for accepted, _ in expected) < ROUNDS - 4
    assert outcomes(*round_) == expected
    if vocab == 50_000:
        with edited([FEW_TAKEN_FOR_MANY]):
            assert outcomes(*round_) != expected
