"""Attention by blocks, and its gradients, against the whole square that JAX differentiates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from ssd_jax.models.sequence_attention import causal_attention
from tests.selection import cases


def plain(q, k, v, visible):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def inputs(length, dtype, heads=6, kv_heads=2):
    """Two rows of texts of unequal lengths."""
    rng = np.random.default_rng(length)
    shapes = [(2, length, heads, 8), (2, length, kv_heads, 8), (2, length, kv_heads, 8)]
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    segments = np.sort(rng.integers(1, 4, (2, length)))
    earlier = np.tri(length, dtype=bool)
    return q, k, v, jnp.asarray((segments[:, :, None] == segments[:, None, :]) & earlier)


@pytest.mark.parametrize("length", cases([1, 5, 128, 129, 300], 5, 129))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_values_and_gradients_are_those_of_the_whole_square(length, dtype, tolerance):
    q, k, v, visible = inputs(length, dtype)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=q.shape), jnp.float32)

    def loss(attention, q, k, v):
        return jnp.sum(attention(q, k, v, visible) * weight)

    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    wanted = plain(*wide, visible)
    found = jax.jit(causal_attention)(q, k, v, visible)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=tolerance)
    of_plain = jax.grad(loss, argnums=(1, 2, 3))(plain, *wide)
    of_blocks = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)(
        causal_attention, q, k, v
    )
    for gradient, other, x in zip(of_blocks, of_plain, (q, k, v), strict=True):
        assert gradient.dtype == x.dtype
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(
            gradient.astype(jnp.float32) / scale, other / scale, atol=tolerance
        )


@pytest.mark.more
def test_packed_attention_takes_one_head_for_all_queries_and_one_each():
    for kv_heads in (1, 6):
        q, k, v, visible = inputs(140, "float32", kv_heads=kv_heads)
        np.testing.assert_allclose(
            causal_attention(q, k, v, visible), plain(q, k, v, visible), atol=1e-5
        )


def test_windows_caps_scales_and_sinks_and_their_gradients_are_those_of_the_whole_square():
    length, window = 130, 20
    q, k, v, segments = inputs(length, "float32")
    positions = jnp.asarray(np.maximum(np.arange(length) - [[0], [40]], 0))
    visible = segments & (positions[:, :, None] - positions[:, None] < window)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=q.shape), jnp.float32)

    def attention_at_once(q, k, v, sinks):
        k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
        scores = 1.5 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.9 / 1.5)
        scores = jnp.where(visible[:, None], scores, -jnp.inf)
        scores = jnp.append(
            scores, jnp.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1)), axis=-1
        )
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1)[..., :-1], v)

    def by_blocks(q, k, v, sinks):
        variant = AttentionVariant(window=window, soft_cap=1.5, scale=0.9, sinks=sinks)
        return causal_attention(q, k, v, segments, positions, variant)

    def loss(attention):
        def total(*operands):
            attended = attention(*operands)
            return jnp.sum(attended * weight), attended

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))

    operands = q, k, v, jnp.linspace(-1, 2, q.shape[2])
    wanted, wanted_values = loss(attention_at_once)(*operands)
    found, values = loss(by_blocks)(*operands)
    np.testing.assert_allclose(values, wanted_values, atol=1e-5)
    for gradient, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(gradient, other, atol=1e-5 * float(jnp.max(jnp.abs(other))))
