"""The outcomes that a draft expects of a sampled tree, where a rule compares p with q.

The children of a row were drawn; if none is accepted, the bonus comes from what is left of p. The
tokens that the draft expects there are none of the children, and independent of their noise: the
likeliest by q and, where that is known, by the noise that will draw the bonus. They come behind the
children in the list of a row's continuations, so that the choice of outcomes is that of
`outcomes.likeliest_outcomes`.

How often a child is accepted depends on the probability that it was drawn with. Any choice is
exact: the tokens of a branch are drawn and judged with noise of its own start, which decides
nothing here. The rates never change, so that a text depends on no other request.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.devices.trees.record import TreeRecord, are_children

_ACCEPTED = (
    (0.23, 0.11, 0.08, 0.05, 0.05, 0.05),
    (0.33, 0.23, 0.13, 0.05, 0.05, 0.05),
    (0.51, 0.36, 0.13, 0.05, 0.05, 0.05),
    (0.59, 0.50, 0.20, 0.05, 0.05, 0.05),
    (0.72, 0.54, 0.30, 0.05, 0.05, 0.05),
    (0.80, 0.58, 0.30, 0.05, 0.05, 0.05),
    (0.90, 0.60, 0.30, 0.05, 0.05, 0.05),
    (0.98, 0.60, 0.30, 0.05, 0.05, 0.05),
    (0.49, 0.20, 0.10, 0.05, 0.05, 0.05),
)
"""Share of the first, second, .. children of rows that are accepted, of those before which no other
child was, by class of q; the last line is of children whose q is not known."""

_OF_LEAVES = {
    "plain": (0.5, 0.15, 0.08, 0.05, 0.03, 0.02),
    "noise": (0.54, 0.12, 0.055, 0.055, 0.045, 0.01),
}
"""Share of the bonus tokens behind a leaf, drawn from p, that the draft ranks first, second, .."""

_OF_RESIDUALS = {
    "plain": (0.12, 0.06, 0.04, 0.02, 0.02, 0.02),
    "noise": (0.125, 0.065, 0.06, 0.045, 0.02, 0.01),
}
"""The same behind a row whose children were all rejected."""


def outcome_rates(record: TreeRecord, predict: str) -> Float32[Array, "B m+1 ranks"]:
    """How often the text goes on by each continuation of each row, once it comes to the row.

    Args:
      record: its candidates are those of `continuations`.
      predict: see `Drafting`.
    """
    is_child, ranks = are_children(record), record.candidates.shape[2]
    place, children = _places(is_child), is_child.sum(axis=2)
    of_node = jnp.array(_ACCEPTED)[record.q_class[:, None], jnp.minimum(place, ranks - 1)]
    at_place = is_child[:, :, None] & (place[:, :, None] == jnp.arange(ranks)[:, None])
    accepted = jnp.sum(jnp.where(at_place, of_node[:, :, None], 0.0), axis=3)
    rejected = jnp.cumprod(1 - accepted, axis=2)  # all up to each place
    before = jnp.pad(rejected[:, :, :-1], ((0, 0), (0, 0), (1, 0)), constant_values=1.0)
    rank = jnp.arange(ranks) - children[:, :, None]
    shares = jnp.array([_OF_LEAVES[predict], _OF_RESIDUALS[predict]])
    of_bonus = shares[(children > 0).astype(int)[:, :, None], jnp.maximum(rank, 0)]
    return jnp.where(rank < 0, before * accepted, rejected[:, :, -1:] * of_bonus)


def continuations(
    record: TreeRecord, bonus: Int32[Array, "B m+1 ranks"]
) -> Int32[Array, "B m+1 ranks"]:
    """The continuations of every row: its children, then the bonus tokens that are none of them.

    Args:
      bonus: that the draft expects, best first; -1 is none.
    """
    is_child, ranks = are_children(record), bonus.shape[2]
    children = is_child.sum(axis=2, dtype=jnp.int32)
    tokens = jnp.broadcast_to(record.tokens[:, None], is_child.shape)
    is_taken = is_child[:, :, None] & (tokens[:, :, None] == bonus[:, :, :, None])
    is_other = (bonus >= 0) & ~is_taken.any(axis=3)
    placed = _at_places(tokens, is_child, jnp.zeros_like(children), ranks)
    behind = _at_places(bonus, is_other, children, ranks)
    return jnp.maximum(placed, behind)


def _places(exists: Bool[Array, "B R n"]) -> Int32[Array, "B R n"]:
    """The place of each among those that exist, from 0; anything of others."""
    return jnp.maximum(jnp.cumsum(exists, axis=2) - 1, 0)


def _at_places(
    tokens: Int32[Array, "B R n"],
    exists: Bool[Array, "B R n"],
    first: Int32[Array, "B R"],
    count: int,
) -> Int32[Array, "B R {count}"]:
    """The tokens that exist, in order from the place `first` on; -1 elsewhere."""
    place = first[:, :, None] + _places(exists)
    at_place = exists[:, :, None] & (place[:, :, None] == jnp.arange(count)[:, None])
    return jnp.max(jnp.where(at_place, tokens[:, :, None], -1), axis=3)
