"""Keys of random draws: every draw has its own, derived from what the draw is for."""

from __future__ import annotations

import enum

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from ssd_jax.kernels.noise import Key, gumbel_of, threefry, unit


class Purpose(enum.IntEnum):
    """What a draw is for; two draws for different purposes never share a key."""

    DRAFT = 0
    ACCEPT = 1
    BONUS = 2
    TOKEN = 3


def derive(
    seed: UInt32[Array, "B 2"],
    request: UInt32[Array, "B"],
    start: Int32[Array, "B"],
    position: Int32[Array, "B"],
    purpose: Purpose,
) -> Key:
    """Keys for one draw a row.

    Args:
      seed: low and high word of the user's seed.
      request: the sample index that the caller gives; never a slot.
      start: for a target draw, the position of the round's pending token. It belongs in the key:
        discarded draft tokens influence which outcomes are cached, and a uniform reused at the
        same position would be conditioned on that.
      position: absolute, of the token being drawn (for a draft draw: the step).
    """
    key = threefry(
        (seed[:, 0], seed[:, 1]), (request.astype(jnp.uint32), jnp.full_like(request, purpose))
    )
    return threefry(key, (start.astype(jnp.uint32), position.astype(jnp.uint32)))


def uniform(key: Key) -> Float32[Array, "B"]:
    """One uniform in (0, 1) a key, with full relative precision near 0."""
    zero = jnp.zeros_like(key[0])
    return unit(*threefry(key, (zero, zero)))


def gumbel(key: Key, count: int) -> Float32[Array, "B {count}"]:
    """Standard Gumbel noise of token ids 0..count-1; see `gumbel_of`."""
    return gumbel_of(key, jnp.arange(count)[None])
