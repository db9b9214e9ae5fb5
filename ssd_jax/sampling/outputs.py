"""Reduced output vocabularies: the token that each column of a draft's logits stands for.

Such a draft has logits for N tokens only. `outputs` holds their ids, ascending; None is a whole
vocabulary, where column v is token v. All results of a draw, and all noise, are in token ids; q is
0 for tokens that have no column.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

Ids = Int32[jax.Array | np.ndarray, "N"]
Outputs = Ids | None


def every_id(outputs: Outputs, columns: int) -> Int32[Array, "{columns}"]:
    """Token ids of all columns."""
    return jnp.arange(columns, dtype=jnp.int32) if outputs is None else jnp.asarray(outputs)


def ids_of(outputs: Outputs, columns: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Token ids of some columns; negative columns stand for none and give -1."""
    if outputs is None:
        return columns
    return jnp.where(columns < 0, -1, jnp.asarray(outputs)[columns])


def columns_of(outputs: Ids, ids: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """Columns of some tokens; N where a token has none."""
    output_ids = jnp.asarray(outputs)
    column = jnp.searchsorted(output_ids, ids)
    exists = output_ids[jnp.minimum(column, output_ids.size - 1)] == ids
    return jnp.where(exists, column, output_ids.size)
