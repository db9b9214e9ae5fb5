"""The tree of proposed tokens that a verification runs: which row follows which.

Row 0 runs the pending token, row i + 1 node i of the tree; a node comes after its parent. The path
to a row is a bit mask of nodes, the row's own included, so that depths, positions and what a row
sees follow from it: bit i is node i. The chain, in which node i follows node i - 1, is the usual
case, and needs no parents.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ssd_jax.kernels.kv_pages import chain_path

Parents = Int32[Array, "B m"]
"""The row of each node's parent."""


def paths(parents: Parents) -> Int32[Array, "B m+1"]:
    """The path to every row."""
    nodes = parents.shape[1]
    node_bit = jnp.asarray(1 << np.arange(nodes, dtype=np.int64), jnp.int32)
    path = jnp.pad(jnp.broadcast_to(node_bit, parents.shape), ((0, 0), (1, 0)))
    ancestor = jnp.pad(parents, ((0, 0), (1, 0)))
    # Each step doubles the part of a path that a row has, and how far away its ancestor is.
    for _ in range(max(nodes - 1, 1).bit_length()):
        path = path | jnp.take_along_axis(path, ancestor, axis=1)
        ancestor = jnp.take_along_axis(ancestor, ancestor, axis=1)
    return path


def chain_paths(nodes: int) -> Int32[Array, "{nodes}+1"]:
    """The path to every row of a chain."""
    return chain_path(jnp.arange(nodes + 1, dtype=jnp.int32))


def depth_of(path: Int32[Array, "*rows"]) -> Int32[Array, "*rows"]:
    """Number of proposed tokens on a path."""
    return jax.lax.population_count(path)


def on_path(path: Int32[Array, "*rows"], nodes: int) -> Bool[Array, "*rows {nodes}"]:
    """Whether each node is on a path."""
    return (path[..., None] >> jnp.arange(nodes)) & 1 == 1


def rows_of(path: Int32[Array, "B"], depth: int, nodes: int) -> Int32[Array, "B {depth}+1"]:
    """The rows of a path in order, that of the pending token first; 0 behind its end."""
    member = on_path(path, nodes)
    place = jnp.cumsum(member, axis=1, dtype=jnp.int32)
    at_place = member[:, None] & (place[:, None] == jnp.arange(1, depth + 1)[:, None])
    rows = jnp.max(jnp.where(at_place, jnp.arange(1, nodes + 1), 0), axis=-1)
    return jnp.pad(rows, ((0, 0), (1, 0)))
