"""Upper bounds on the tokens per second of SD and SSD with token trees, from given seconds.

Tokens and hits follow from the rates of ranks that trees start with, at an acceptance.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.speculation.tree_tokens import hit_rates, tree_tokens
from ssd_jax.tools.aot.parts import ModelPart
from ssd_jax.tools.aot.programs import Sizes
from ssd_jax.tuning.throughput import Costs


class TreeSeconds(NamedTuple):
    """Lower bounds of the seconds of the parts of a round of mode ssd.

    Attributes:
      verify: verification of a tree.
      alone: verification of the pending token alone.
      branches: promotion and expansion of the records.
      backup: a tree that is drafted just in time.
    """

    verify: float
    alone: float
    branches: float
    backup: float


def seconds_of(target: ModelPart, draft: ModelPart, sizes: Sizes) -> TreeSeconds:
    """The seconds of a target and of a draft that has devices of its own."""
    further = sizes.k - 1
    branches = draft.seconds("promote_tree") + draft.seconds("expand_tree")
    backup = draft.seconds("begin_tree") + draft.seconds("adopt_tree")
    return TreeSeconds(
        verify=target.seconds("forward_tree") + target.seconds("accept_tree"),
        alone=target.seconds("forward", 0) + target.seconds("accept", sizes.slots, 0),
        branches=branches + further * draft.seconds("grow_branches"),
        backup=backup + further * draft.seconds("grow_tree"),
    )


def sd(costs: Costs, acceptance: float, sizes: Sizes) -> float:
    """Of mode sd; `costs` have the rounds of the trees."""
    shape = sizes.tree
    tokens = tree_tokens(RankRates(shape).by_class, acceptance, shape)
    return sizes.slots * tokens / costs.trees[sizes.nodes]


def ssd(seconds: TreeSeconds, acceptance: float, sizes: Sizes, *, waits: bool) -> float:
    """Of mode ssd, where all rows wait for one that has missed.

    Args:
      waits: whether a miss waits for a tree; else the row draws one token.
    """
    rows, shape = sizes.slots, dataclasses.replace(sizes.tree, ancestors=sizes.k)
    rates = RankRates(shape).by_class
    tokens = tree_tokens(rates, acceptance, shape)
    behind_tree, behind_token = hit_rates(rates, acceptance, shape, sizes.branches)
    with_tree = max(seconds.verify, seconds.branches)
    if waits:
        return rows * tokens / (with_tree + (1 - behind_tree**rows) * seconds.backup)
    trees = behind_token / (1 - behind_tree + behind_token)  # of the rounds of a row
    none = (1 - trees) ** rows  # rounds without a tree
    period = (1 - none) * with_tree + none * max(seconds.alone, seconds.branches)
    return rows * (trees * tokens + 1 - trees) / period
