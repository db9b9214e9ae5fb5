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
    """Lower bounds of the seconds of the programs of a round of mode ssd.

    Attributes:
      verify: verification of a tree.
      alone: verification of the pending token alone.
      expand: promotion of the records, and the first forwards of their branches.
      grow: a further depth of the branches.
      begin, further: the first depth of a tree that is drafted just in time, and each other one.
    """

    verify: float
    alone: float
    expand: float
    grow: float
    begin: float
    further: float

    def branches(self, depth: int) -> float:
        """Seconds of branches whose paths have so many tokens."""
        return self.expand + (depth - 1) * self.grow

    def backup(self, depth: int) -> float:
        """Seconds of a tree that is drafted just in time."""
        return self.begin + (depth - 1) * self.further


def seconds_of(target: ModelPart, draft: ModelPart, sizes: Sizes) -> TreeSeconds:
    """The seconds of a target and of a draft that has devices of its own."""
    return TreeSeconds(
        verify=target.seconds("forward_tree") + target.seconds("accept_tree"),
        alone=target.seconds("forward", 0) + target.seconds("accept", sizes.slots, 0),
        expand=draft.seconds("promote_tree") + draft.seconds("expand_tree"),
        grow=draft.seconds("grow_branches"),
        begin=draft.seconds("begin_tree") + draft.seconds("adopt_tree"),
        further=draft.seconds("grow_tree"),
    )


def sd(costs: Costs, acceptance: float, sizes: Sizes) -> float:
    """Of mode sd; `costs` have the rounds of the trees."""
    shape = sizes.tree
    tokens = tree_tokens(RankRates(shape).by_class, acceptance, shape)
    return sizes.slots * tokens / costs.trees[sizes.nodes]


def ssd(seconds: TreeSeconds, acceptance: float, sizes: Sizes) -> float:
    """Of mode ssd, where branches get as many depths, up to K, as is best for the speed, and all
    rows wait for a tree where one has missed, or those that have missed draw one token."""
    depths = range(1, sizes.k + 1)
    return max(_ssd(seconds, acceptance, sizes, depth) for depth in depths)


def _ssd(seconds: TreeSeconds, acceptance: float, sizes: Sizes, depth: int) -> float:
    rows = sizes.slots
    shape = dataclasses.replace(sizes.tree, depth=depth, ancestors=sizes.k)
    rates = RankRates(shape).by_class
    tokens = tree_tokens(rates, acceptance, shape)
    behind_tree, behind_token = hit_rates(rates, acceptance, shape, sizes.branches)
    branches = seconds.branches(depth)
    with_tree = max(seconds.verify, branches)
    waiting = with_tree + (1 - behind_tree**rows) * seconds.backup(depth)
    trees = behind_token / (1 - behind_tree + behind_token)  # of the rounds of a row
    none = (1 - trees) ** rows  # rounds without a tree
    period = (1 - none) * with_tree + none * max(seconds.alone, branches)
    return max(rows * tokens / waiting, rows * (trees * tokens + 1 - trees) / period)
