"""The class of a draft's confidence in a token, on devices; see `confidence`."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.sampling.confidence import EDGES, GAP_EDGES, SHARED_EDGES

_LEAST = 1e-6  # chance that a token is another one


def class_of_probability(probability: Float32[Array, "*rows"]) -> Int32[Array, "*rows"]:
    """The class of a token with this probability."""
    return _class_of(probability, EDGES)


def class_of_gap(scores: Float32[Array, "B n"]) -> Int32[Array, "B"]:
    """The class of rows with these scores, best first.

    A token without a rival has the last class, a row without a token the first.
    """
    return _class_of(_gap(scores), GAP_EDGES)


def class_of_shared_noise(
    scores: Float32[Array, "B n"], probability: Float32[Array, "B"]
) -> Int32[Array, "B"]:
    """The class of a token that noise has drawn which the target draws with, too.

    Args:
      scores: log q + noise, best first.
      probability: of the best.
    """
    odds = jnp.log(probability) - jnp.log(jnp.maximum(1 - probability, _LEAST))
    return _class_of(odds + _gap(scores), SHARED_EDGES)


def _gap(scores: Float32[Array, "B n"]) -> Float32[Array, "B"]:
    best = scores[:, 0]
    rival = scores[:, 1] if scores.shape[1] > 1 else jnp.full_like(best, -jnp.inf)
    alone = (rival == -jnp.inf) & (best > -jnp.inf)
    return jnp.where(alone, jnp.inf, best - rival)


def _class_of(value: Float32[Array, "*rows"], edges: tuple[float, ...]) -> Int32[Array, "*rows"]:
    return jnp.sum(value[..., None] >= jnp.array(edges), axis=-1, dtype=jnp.int32)
