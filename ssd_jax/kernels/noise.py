"""Counter-based random bits, and the noise made of them.

A key is a pair of uint32 words. Bits are those of Threefry-2x32 (Salmon et al., 2011, 20 rounds),
implemented here so that draws never change with the JAX version, the array length, the sharding
or the process that computes them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from ssd_jax.kernels.rows import argmax, row_max

_BLOCK, _BLOCKS = 128, 64  # noise is drawn for only so many blocks of ids if no others have weight
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


Words = tuple[UInt32[Array, "..."], UInt32[Array, "..."]]
Key = tuple[UInt32[Array, "B"], UInt32[Array, "B"]]
"""Two words a row."""


@jax.jit  # traced once for all draws of the same shape
def threefry(key: Words, counter: Words) -> Words:
    """The Threefry-2x32 block cipher; arguments broadcast together."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x0, x1 = counter[0] + schedule[0], counter[1] + schedule[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x0 ^ x1
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0, x1


def gumbel_of(key: Key, ids: Int32[Array, "#B n"]) -> Float32[Array, "B n"]:
    """Standard Gumbel noise of token ids.

    The noise of id v depends on (key, v) alone. 64 random bits a value keep the tails exact to
    float32: the largest noise is about 44, where 24 bits would stop at 17.
    """
    # Only the barrier keeps the compiler from computing a row's key again for every id.
    key = jax.lax.optimization_barrier(key)
    ids = ids.astype(jnp.uint32)
    u = unit(*threefry((key[0][:, None], key[1][:, None]), (ids, jnp.zeros_like(ids))))
    return -jnp.log(-jnp.log1p(-u))  # small u is where large noise comes from


def gumbel_max(
    weights: Float32[Array, "B V"], key: Key, *, check_blocks: bool = True
) -> Int32[Array, "B"]:
    """The token that a key's noise draws by weights, which are not negative and not normalised.

    With `check_blocks` the device first checks whether a few blocks of ids have all the weight.
    """
    batch, vocab = weights.shape

    def over_all_ids() -> jax.Array:
        return argmax(jnp.log(weights) + gumbel_of(key, jnp.arange(vocab)[None]))

    if not check_blocks or vocab < 2 * _BLOCK * _BLOCKS:
        return over_all_ids()
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(batch, -1, _BLOCK)
    largest = row_max(blocks)[..., 0]

    def over_few_blocks() -> jax.Array:
        """Truncated distributions live in few blocks; the noise of an id is the same there."""
        block = jnp.sort(jax.lax.top_k(largest, _BLOCKS)[1])
        ids = (block[:, :, None] * _BLOCK + jnp.arange(_BLOCK)).reshape(batch, -1)
        block_weights = jnp.take_along_axis(blocks, block[:, :, None], axis=1).reshape(batch, -1)
        best = argmax(jnp.log(block_weights) + gumbel_of(key, ids))
        return jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0]

    fits = jnp.all(jnp.sum(largest > 0, axis=-1) <= _BLOCKS)
    return jax.lax.cond(fits, over_few_blocks, over_all_ids)


def unit(high: UInt32[Array, "*shape"], low: UInt32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """64 random bits as a float32 in (0, 1)."""
    u = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) * 2.0**-32
    return jnp.minimum(u, jnp.float32(1 - 2.0**-24))
