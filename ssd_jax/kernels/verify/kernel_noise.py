"""The noise of `noise.py` in operations that kernels have: words are int32, and so are ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

Words = tuple[Any, Any]
"""Two words, each of a scalar or of an array in a kernel's memory."""

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def gumbel(key: Words, ids: Any, log1p: Callable[[Any], Any] = jnp.log1p) -> Any:
    """`noise.gumbel_of`, given words that broadcast to the ids.

    `log1p` is the kernel's own, of numbers in (-1, 0).
    """
    high, low = threefry(key, (ids, jnp.zeros_like(ids)))
    u = (_float(high) + (_float(low) + 0.5) * 2.0**-32) * 2.0**-32
    u = jnp.minimum(u, jnp.float32(1 - 2.0**-24))
    return -jnp.log(-log1p(-u))


def threefry(key: Words, counter: Words) -> Words:
    """`noise.threefry`."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.int32(_PARITY))
    x0, x1 = counter[0] + schedule[0], counter[1] + schedule[1]
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x0 = x0 + x1
            x1 = lax.shift_left(x1, jnp.full_like(x1, rotation)) | lax.shift_right_logical(
                x1, jnp.full_like(x1, 32 - rotation)
            )
            x1 = x0 ^ x1
        x0 = x0 + schedule[(block + 1) % 3]
        x1 = x1 + schedule[(block + 2) % 3] + jnp.int32(block + 1)
    return x0, x1


def _float(word: Any) -> Any:
    """The float32 nearest to an unsigned word: both halves are exact, and their sum rounds once."""
    half = lax.shift_right_logical(word, jnp.full_like(word, 16))
    return half.astype(jnp.float32) * 65536.0 + (word & 0xFFFF).astype(jnp.float32)
