"""Rates that shape the trees of sampled rows where a rule compares p with q. Pure host code.

They never change, and no class of a gap has its own: so the shape of a tree does not depend on what
was drawn, which those rules need, nor the text of a request on what others taught.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32

from ssd_jax.roles.drafting import GAP_CLASSES, TreeShape

_OF_SIBLINGS = (0.65, 0.12, 0.05, 0.03, 0.02, 0.015)
"""Share of the nodes whose first, second, .. child a target accepts by recursive rejection."""


def fixed_rates(shape: TreeShape, *, trees: bool) -> Float32[np.ndarray, "depths classes ranks"]:
    """The rates of (depth, class of the gap, rank), as `rank_rates.RankRates` has them.

    The best tree for them is Sequoia's (Chen et al., arXiv 2402.12374): they are the expected
    acceptance of its nodes, which add up.

    Args:
      trees: whether sampled rows have trees; else all rates but those of the first child are 0,
        and the tree is a chain.
    """
    known = _OF_SIBLINGS if trees else _OF_SIBLINGS[:1]
    rates = np.zeros(shape.ranks, np.float32)
    rates[: len(known)] = known[: shape.ranks]
    return np.broadcast_to(rates, (shape.depth, GAP_CLASSES, shape.ranks))
