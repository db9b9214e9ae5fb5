"""Whole sequences at once give the logits that the engine's forward gives, text by text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.models import sequence
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sequence import narrow_product, sequence_hidden, sequence_logits
from ssd_jax.testing import tiny
from tests.models.every_mechanism import EVERY_MECHANISM, EXPERTS, OTHER_NORMS
from tests.models.golden import FLOAT32, Runner, parameters

BATCH, LENGTH, CUT = 2, 12, 5


def packed(rng):
    """Two rows, each of two texts: the first of CUT tokens, the second of the rest."""
    tokens = rng.integers(0, tiny.TOKENS, (BATCH, LENGTH)).astype(np.int32)
    positions = np.concatenate([np.arange(CUT), np.arange(LENGTH - CUT)])
    segments = np.repeat([1, 2], [CUT, LENGTH - CUT])
    both = np.stack([positions, segments]).astype(np.int32)[:, None].repeat(BATCH, axis=1)
    return tokens, *both


def logits(model, weights, tokens, positions, segments, **options):
    @jax.jit
    def run(weights):
        module = model.module(weights)
        hidden = sequence_hidden(module, tokens, positions, segments, **options)
        flat = hidden.reshape(tokens.size, -1)
        return sequence_logits(module, flat, compute=options.get("compute"))

    return np.asarray(run(weights)).reshape(*tokens.shape, -1)


def opened(path, **changes):
    checkpoint = open_checkpoint(str(path))
    model = FunctionalModel(checkpoint.config, dataclasses.replace(FLOAT32, **changes))
    return model, parameters(checkpoint, model)


@pytest.mark.more
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("llama", {}), ("qwen2", {}), ("qwen3", {})),
        *(("granite", EVERY_MECHANISM), ("nemotron", OTHER_NORMS), ("granite", EXPERTS)),
    ],
)
def test_packed_texts_get_the_logits_of_the_engine(family, changes, tmp_path):
    model, weights = opened(tiny.write_checkpoint(tmp_path / family, family, **changes))
    tokens, positions, segments = packed(np.random.default_rng(0))
    got = logits(model, weights, tokens, positions, segments)
    run = Runner(model, weights, slots=BATCH)
    first = run(tokens[:, :CUT])
    second = run(tokens[:, CUT:])  # from position 0 again: the first text's keys are beyond it
    expected = np.concatenate([first, second], axis=1)
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_a_segment_does_not_see_the_one_before(tiny_checkpoint):
    model, weights = opened(tiny_checkpoint)
    tokens, positions, segments = packed(np.random.default_rng(1))
    other = tokens.copy()
    other[:, :CUT] = (tokens[:, :CUT] + 1) % tiny.TOKENS
    one = logits(model, weights, tokens, positions, segments)
    two = logits(model, weights, other, positions, segments)
    np.testing.assert_array_equal(one[:, CUT:], two[:, CUT:])
    together = np.ones_like(segments)  # the mutant: segments ignored
    one = logits(model, weights, tokens, positions, together)
    two = logits(model, weights, other, positions, together)
    assert not np.array_equal(one[:, CUT:], two[:, CUT:])


def test_scanned_and_rematerialised_layers_give_the_same(tiny_checkpoint):
    tokens, positions, segments = packed(np.random.default_rng(2))
    model, weights = opened(tiny_checkpoint)
    plain = logits(model, weights, tokens, positions, segments)
    scanned = logits(
        *opened(tiny_checkpoint, scan_layers=True), tokens, positions, segments, rematerialise=True
    )
    np.testing.assert_allclose(scanned, plain, atol=1e-5 * np.abs(plain).max())


def test_weights_are_cast_where_they_are_used(tiny_checkpoint):
    """float32 masters computed in bfloat16 are what bfloat16 weights give; so are int8 ones."""
    tokens, positions, segments = packed(np.random.default_rng(3))
    narrow = jnp.dtype(jnp.bfloat16)
    model, weights = opened(tiny_checkpoint)
    cast = logits(model, weights, tokens, positions, segments, compute=narrow)
    stored = logits(*opened(tiny_checkpoint, compute=narrow), tokens, positions, segments)
    np.testing.assert_allclose(cast, stored, atol=1e-5 * np.abs(stored).max())
    rows = logits(
        *opened(tiny_checkpoint, compute=jnp.dtype(jnp.int8)), tokens, positions, segments
    )
    assert np.abs(rows - stored).mean() < 0.05 * stored.std()


def test_the_gradients_of_a_product_are_those_of_its_operands():
    rng = np.random.default_rng(4)
    shapes = [(6, 4), (5, 4), (6, 5)]
    x, weight, seed = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)

    def loss(x, weight, dtype):
        return jnp.sum(narrow_product(x, weight, dtype) * seed)

    exact = jax.grad(loss, argnums=(0, 1))(x, weight, jnp.dtype(jnp.float32))
    np.testing.assert_allclose(exact[0], seed @ weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(exact[1], seed.T @ x, rtol=1e-5, atol=1e-6)
    rounded = jax.grad(loss, argnums=(0, 1))(x, weight, jnp.dtype(jnp.bfloat16))
    assert {g.dtype for g in rounded} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(rounded[1], exact[1], atol=0.05)


@pytest.mark.parametrize(
    ("rows", "inside", "outside"),
    [
        *((rows, *pair) for rows in (64, 100, 192) for pair in ((48, 144), (144, 48))),
        *((rows, 64, 64) for rows in (1, 2, 63, 500)),
    ],
)
def test_bfloat16_gradients_of_wide_and_narrow_products_run(rows, inside, outside):
    """On CPU some forms of a bfloat16 product compile and then cannot run."""
    rng = np.random.default_rng(7)
    x, weight, seed = (
        rng.normal(size=s).astype(np.float32)
        for s in [(rows, inside), (outside, inside), (rows, outside)]
    )

    @jax.jit
    def gradients(x, weight):
        def loss(x, weight):
            return jnp.sum(narrow_product(x, weight, jnp.dtype(jnp.bfloat16)) * seed)

        return jax.grad(loss, argnums=(0, 1))(x, weight)

    found = gradients(x, weight)
    for gradient, exact in zip(found, (seed @ weight, seed.T @ x), strict=True):
        assert np.abs(gradient - exact).max() < 0.02 * np.abs(exact).max()


def test_the_whole_model_has_the_gradient_of_finite_differences(tiny_checkpoint):
    model, weights = opened(tiny_checkpoint)
    tokens, positions, segments = packed(np.random.default_rng(5))

    @jax.jit
    def loss(weights):
        module = model.module(weights)
        hidden = sequence.sequence_hidden(module, tokens, positions, segments)
        return jnp.mean(jnp.tanh(sequence_logits(module, hidden.reshape(tokens.size, -1)[::3])))

    gradients = jax.jit(jax.grad(loss))(weights)
    rng = np.random.default_rng(6)
    direction = [rng.normal(size=w.shape).astype(np.float32) for w in weights]
    step = 1e-3
    ahead, behind = (
        loss([w + sign * step * d for w, d in zip(weights, direction, strict=True)])
        for sign in (1, -1)
    )
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(gradients, direction, strict=True))
    assert slope == pytest.approx(float(ahead - behind) / (2 * step), rel=0.03, abs=1e-4)
