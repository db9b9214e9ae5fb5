"""Reduced output vocabularies: which token each column of a draft's logits stands for.

Such a draft has logits of N tokens only. `outputs` [N] int32, ascending, are their ids; None is a
whole vocabulary, where column v is token v. Everything that leaves a draw, and all noise, is in
token ids; to the tokens that have no column, q gives 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Outputs = jax.Array | np.ndarray | None


def every_id(outputs: Outputs, columns: int) -> jax.Array:
    """Token ids of all columns, [columns] int32."""
    return jnp.arange(columns, dtype=jnp.int32) if outputs is None else jnp.asarray(outputs)


def ids_of(outputs: Outputs, columns: jax.Array) -> jax.Array:
    """Token ids of some columns, int32 of any shape; negative ones are none, and stay -1."""
    if outputs is None:
        return columns
    return jnp.where(columns < 0, -1, jnp.asarray(outputs)[columns])


def columns_of(outputs: jax.Array | np.ndarray, ids: jax.Array) -> jax.Array:
    """Columns of some tokens, int32 of any shape; N where a token has none."""
    known = jnp.asarray(outputs)
    place = jnp.searchsorted(known, ids)
    found = known[jnp.minimum(place, known.size - 1)] == ids
    return jnp.where(found, place, known.size)
