"""The outcomes that a draft expects of a sampled tree, where a rule compares p with q.

The children of a row were drawn; if none is accepted, the bonus comes from what is left of p. The
tokens that the draft expects there are none of the children, and independent of their noise: the
likeliest by q and, where that is known, by the noise that will draw the bonus. They come behind the
children in the list of a row's continuations, so that the choice of outcomes is that of
`tree_branching.likeliest_outcomes`; the class of a row is the number of its children.

Any choice is exact: the tokens of a branch are drawn and judged with noise of its own start, which
decides nothing here. The rates never change, so that a text depends on no other request.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.devices import tree_branching
from ssd_jax.devices.tree_branching import TreeRecord
from ssd_jax.roles.drafting import GAP_CLASSES, TreeShape
from ssd_jax.sampling.ranking import Ranking
from ssd_jax.speculation.fixed_rates import fixed_rates

_OF_LEAVES = {
    "plain": (0.5, 0.15, 0.08, 0.05, 0.03, 0.02),
    "noise": (0.8, 0.1, 0.03, 0.02, 0.01, 0.01),
}
"""Share of the bonus tokens behind a leaf, drawn from p, that the draft ranks first, second, .."""

_OF_RESIDUALS = {
    "plain": (0.25, 0.12, 0.08, 0.05, 0.04, 0.03),
    "noise": (0.6, 0.1, 0.05, 0.03, 0.02, 0.02),
}
"""The same behind a row whose children were all rejected."""


def outcome_rates(
    shape: TreeShape, predict: str
) -> Float32[np.ndarray, "{shape.depth}+1 classes ranks"]:
    """How often the text goes on by each continuation of a row: by (depth, children, rank).

    Args:
      predict: see `Drafting`.
    """
    accepted = fixed_rates(shape, trees=True)[0, 0]
    rates = np.zeros((GAP_CLASSES, shape.ranks), np.float32)
    for children, of_class in enumerate(rates):
        of_class[:children] = accepted[:children]
        of_bonus = np.array((_OF_RESIDUALS if children else _OF_LEAVES)[predict], np.float32)
        others = of_class[children:]
        others[:] = (1 - accepted[:children].sum()) * of_bonus[: others.size]
    return np.broadcast_to(rates, (shape.depth + 1, *rates.shape))


def continuations(record: TreeRecord, bonus: Int32[Array, "B m+1 ranks"]) -> Ranking:
    """The continuations of every row: its children, then the bonus tokens that are none of them.

    Args:
      bonus: that the draft expects, best first; -1 is none.

    Returns: as of B * (m + 1) rows.
    """
    is_child, ranks = tree_branching.are_children(record), bonus.shape[2]
    children = is_child.sum(axis=2, dtype=jnp.int32)
    tokens = jnp.broadcast_to(record.tokens[:, None], is_child.shape)
    is_taken = is_child[:, :, None] & (tokens[:, :, None] == bonus[:, :, :, None])
    is_other = (bonus >= 0) & ~is_taken.any(axis=3)
    placed = _at_places(tokens, is_child, jnp.zeros_like(children), ranks)
    behind = _at_places(bonus, is_other, children, ranks)
    rows = bonus.shape[0] * bonus.shape[1]
    return Ranking(
        jnp.maximum(placed, behind).reshape(rows, ranks),
        jnp.minimum(children, GAP_CLASSES - 1).reshape(rows),
    )


def _at_places(
    tokens: Int32[Array, "B R n"],
    there: Bool[Array, "B R n"],
    first: Int32[Array, "B R"],
    count: int,
) -> Int32[Array, "B R {count}"]:
    """The tokens that are there, in order from the place `first` on; -1 elsewhere."""
    place = first[:, :, None] + jnp.cumsum(there, axis=2) - 1
    at_place = there[:, :, None] & (place[:, :, None] == jnp.arange(count)[:, None])
    return jnp.max(jnp.where(at_place, tokens[:, :, None], -1), axis=3)
