"""Arguments shared by every backend of `tree_attention`."""

from __future__ import annotations

from typing import NamedTuple

import jax


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
