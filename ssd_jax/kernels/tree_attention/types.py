"""Arguments shared by every backend of `tree_attention`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.kernels import kv_pages


class Scratch(NamedTuple):
    """Keys and values of branch tokens, not yet part of any sequence's pages.

    Attributes:
      k, v: [B, kv_heads, depths, branches, head_dim]; entry (d, m) is the token of branch m at
        depth d.
      ancestor: [B, R, 2] int32, each query's (branch, depth). It sees the entries of its own
        branch at depths 0..depth; depth -1 sees none.
    """

    k: jax.Array
    v: jax.Array
    ancestor: jax.Array

    def write(self, k: jax.Array, v: jax.Array) -> Scratch:
        """With each query's own key and value [B, R, kv_heads, head_dim] at its (branch, depth)."""
        return self._replace(k=_put(self.k, self.ancestor, k), v=_put(self.v, self.ancestor, v))


def _put(stored: jax.Array, ancestor: jax.Array, values: jax.Array) -> jax.Array:
    rows = jnp.arange(values.shape[0])[:, None]
    branch, depth = ancestor[..., 0], ancestor[..., 1]
    depth = jnp.where(depth < 0, stored.shape[2], depth)
    encoded = kv_pages.encode(values, stored.dtype)
    return stored.at[rows, :, depth, branch].set(encoded, mode="drop")
