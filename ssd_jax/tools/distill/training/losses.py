"""The losses of a draft at one position: p is the target's distribution, q the draft's.

  cross entropy  -log q(next token)
  KL             sum over ids of p log(p / q)
  acceptance     1 - sum over ids of min(p, q): the chance that a proposal is rejected

Of a cached p only the likeliest N ids are known. The draft cannot propose ids outside its
vocabulary: their mass counts in no sum (but in `acceptance` as rejected), so that a position counts
as much as the draft can do about it, and a next token outside has no cross entropy. The mass of all
other ids, r, is one bucket in KL, r log(r / what q gives to others), if the draft has any:
renormalising the top N instead would teach q to be surer than p is, and a draft that is wrongly
sure is drafted from, and waited for, too long. In `acceptance` and in its estimate the bucket
counts as rejected, which makes both pessimistic by no more than r.

Gradients with respect to the logits are written out: they need one more exponential, while those
that JAX derives read and write logits, the largest arrays of training, a dozen times.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_SMALLEST = 1e-9
"""Stands in for a mass of zero in a logarithm or a denominator; far below what p is known to."""


class Weights(NamedTuple):
    """The weight of each loss."""

    cross_entropy: float
    kl: float
    acceptance: float


class Sums(NamedTuple):
    """Sums over positions that count, float32; divide by `positions`.

    `overlap` is of sum(min(p, q)), `agreements` of whether p's likeliest id is q's, alone or
    among equals.
    """

    positions: jax.Array
    loss: jax.Array
    cross_entropy: jax.Array
    kl: jax.Array
    overlap: jax.Array
    agreements: jax.Array


def from_top(
    logits: jax.Array,
    columns: jax.Array,
    probs: jax.Array,
    next_columns: jax.Array,
    mask: jax.Array,
    weights: Weights,
) -> tuple[Sums, jax.Array]:
    """Losses against cached probabilities.

    Args:
      logits: [n, V] float32, of the draft.
      columns: [n, N] int32, of the draft's head, for the likeliest ids of p; one beyond the last
        is an id that the draft lacks. N may be 0 where only cross entropy counts.
      probs: [n, N] float32, their p; 0 where nothing is known.
      next_columns: [n] int32, column of the next token; V if it has none.
      mask: [n] bool, positions that count.

    Returns: sums over positions, and the gradient [n, V] float32 of the summed loss.
    """
    size = logits.shape[1]
    logits_max = jnp.max(logits, axis=1)
    normaliser = logits_max + jnp.log(jnp.sum(jnp.exp(logits - logits_max[:, None]), axis=1))
    inside = columns < size
    p = jnp.where(inside, probs, 0.0)
    known_logits = _gather_logits(logits, columns)
    log_q = known_logits - normaliser[:, None]
    is_known = inside & (probs > 0)
    q = jnp.where(is_known, jnp.exp(log_q), 0.0)
    p_rest = jnp.maximum(1.0 - jnp.sum(probs, axis=1), 0.0)
    p_rest *= jnp.sum(is_known, axis=1) < size  # without others, q_rest is rounding
    q_rest = jnp.maximum(1.0 - jnp.sum(q, axis=1), _SMALLEST)
    cross_entropy, has_next = _cross_entropy(logits, normaliser, next_columns)
    kl = jnp.sum(_p_log(p, log_q), axis=1) + _p_log(p_rest, jnp.log(q_rest))
    less = q < p
    sums = _sums(
        mask,
        weights,
        cross_entropy,
        kl,
        jnp.sum(jnp.minimum(p, q), axis=1),
        _agreements(inside, probs, known_logits, logits_max),
    )
    # With respect to logit j: KL gives (sum of p + rest) q_j - p_j inside the top N, and
    # (sum of p + rest) q_j - rest q_j / q_rest outside; -sum(min) gives q_j (sum of q where less)
    # - q_j [less].
    draftable_mass = jnp.sum(p, axis=1) + p_rest
    common = weights.cross_entropy * has_next + weights.kl * draftable_mass
    common += weights.acceptance * jnp.sum(jnp.where(less, q, 0.0), axis=1)
    outside = common - weights.kl * p_rest / q_rest
    gradient = jnp.exp(logits - normaliser[:, None]) * (outside * mask)[:, None]
    top = q * common[:, None] - weights.kl * p - weights.acceptance * jnp.where(less, q, 0.0)
    rows = jnp.arange(logits.shape[0])
    known_columns = jnp.where(probs > 0, columns, size)
    gradient = gradient.at[rows[:, None], known_columns].set(top * mask[:, None], mode="drop")
    return sums, _subtract_next(gradient, next_columns, has_next & mask, weights)


def from_all(
    logits: jax.Array,
    p: jax.Array,
    largest: jax.Array,
    next_columns: jax.Array,
    mask: jax.Array,
    weights: Weights,
) -> tuple[Sums, jax.Array]:
    """Losses against the target's whole distribution; see `from_top`.

    Args:
      p: [n, V] float32, of the draft's columns; sums to less than 1 if there are others.
      largest: [n] float32, the largest p of any id.
    """
    normaliser = jax.nn.logsumexp(logits, axis=1)
    log_q = logits - normaliser[:, None]
    q = jnp.exp(log_q)
    cross_entropy, has_next = _cross_entropy(logits, normaliser, next_columns)
    less = q < p
    sums = _sums(
        mask,
        weights,
        cross_entropy,
        jnp.sum(_p_log(p, log_q), axis=1),
        jnp.sum(jnp.minimum(p, q), axis=1),
        (_gather_logits(logits, jnp.argmax(p, axis=1)[:, None])[:, 0] >= jnp.max(logits, axis=1))
        & (jnp.max(p, axis=1) >= largest),
    )
    common = weights.cross_entropy * has_next + weights.kl * jnp.sum(p, axis=1)
    common += weights.acceptance * jnp.sum(jnp.where(less, q, 0.0), axis=1)
    gradient = q * (common[:, None] - weights.acceptance * less) - weights.kl * p
    gradient *= mask[:, None]
    return sums, _subtract_next(gradient, next_columns, has_next & mask, weights)


def _gather_logits(logits: jax.Array, columns: jax.Array) -> jax.Array:
    """logits [n, V] at columns [n, N]; a column beyond the last gives some other's."""
    return jnp.take_along_axis(logits, jnp.minimum(columns, logits.shape[1] - 1), axis=1)


def _cross_entropy(
    logits: jax.Array, normaliser: jax.Array, next_columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    has_next = next_columns < logits.shape[1]
    loss = normaliser - _gather_logits(logits, next_columns[:, None])[:, 0]
    return jnp.where(has_next, loss, 0.0), has_next


def _p_log(p: jax.Array, log_q: jax.Array) -> jax.Array:
    """p log(p / q), 0 where p is."""
    return jnp.where(p > 0, p * (jnp.log(jnp.maximum(p, _SMALLEST)) - log_q), 0.0)


def _agreements(
    inside: jax.Array, probs: jax.Array, known_logits: jax.Array, logits_max: jax.Array
) -> jax.Array:
    if probs.shape[1] == 0:
        return jnp.zeros(logits_max.shape, bool)
    likeliest = jnp.argmax(probs, axis=1)[:, None]
    is_top = inside & (known_logits >= logits_max[:, None])
    return jnp.take_along_axis(is_top, likeliest, axis=1)[:, 0]


def _sums(
    mask: jax.Array,
    weights: Weights,
    cross_entropy: jax.Array,
    kl: jax.Array,
    overlap: jax.Array,
    agreements: jax.Array,
) -> Sums:
    loss = weights.cross_entropy * cross_entropy + weights.kl * kl
    loss += weights.acceptance * (1.0 - overlap)
    values = (jnp.ones_like(loss), loss, cross_entropy, kl, overlap, agreements)
    return Sums(*(jnp.sum(jnp.where(mask, value, 0.0)) for value in values))


def _subtract_next(
    gradient: jax.Array, next_columns: jax.Array, mask: jax.Array, weights: Weights
) -> jax.Array:
    """Subtracts the cross entropy's share at the next token."""
    rows = jnp.arange(gradient.shape[0])
    change = -weights.cross_entropy * mask
    return gradient.at[rows, next_columns].add(change, mode="drop")
