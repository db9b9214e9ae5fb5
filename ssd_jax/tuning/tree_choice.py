"""Chooses between the chain and trees of mode sd by tokens a second.

What a tree that was never measured costs is guessed from its neighbours; the one that seems best is
measured, until the best one is. On a machine where the rows of a chain cost, no tree is ever
loaded. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ssd_jax.tuning.throughput import MIN_SPEED_UP, Costs

OTHER_BITS = "here rows of a tree are not computed bit by bit as a text is"


class TreeChoice(NamedTuple):
    """What was chosen, and why.

    Attributes:
      nodes: of the tree; 0 is the chain.
      rates: predicted tokens/s of the chain, as 0, and of the best trees, by their nodes.
      costs: with the rounds of all trees that were measured.
      reason: why there is no tree, where none was compared.
    """

    nodes: int
    rates: Mapping[int, float]
    costs: Costs
    reason: str = ""

    def line(self, k: int, acceptance: float) -> str:
        """A line for the user."""
        taken = f"a tree of {self.nodes}" if self.nodes else "the chain"
        begin = f"tree_nodes auto takes {taken}: "
        if self.reason:
            return begin + self.reason
        rates = "; ".join(
            f"{rate:.1f} with "
            + (f"a tree of {nodes}" if nodes else f"the chain of k = {k}")
            + (" at best" if nodes and nodes not in self.costs.trees else "")
            for nodes, rate in self.rates.items()
        )
        near = ""
        if not self.nodes and max(self.rates.values()) > self.rates[0]:
            near = f"; less than {MIN_SPEED_UP - 1:.0%} more is not taken for a gain"
        return f"{begin}predicted tokens/s are {rates} (an acceptance of {acceptance:.2f}{near})"


def choose(
    costs: Costs,
    k: int,
    tokens: Mapping[int, float],
    measure: Callable[[int], float | None],
    *,
    rows: int = 1,
) -> TreeChoice:
    """The chain, or the best tree if it is faster by more than what is not predicted.

    Args:
      k: K of the chain, and depth of the trees.
      tokens: expected tokens of a round by number of nodes; 0 is the chain.
      measure: how many times as long as one with the chain a round with a tree takes; None if its
        rows are not computed as those of the chain are.
      rows: sequences that are decoded together.
    """
    chain = rows * tokens[0] / costs.sd_round(k)
    while True:
        trees = {
            nodes: rows * expected / tree_round(costs, k, nodes)
            for nodes, expected in tokens.items()
            if nodes
        }
        best = max(trees, key=lambda nodes: trees[nodes])
        rates = {0: chain, best: trees[best]}
        if trees[best] <= MIN_SPEED_UP * chain:
            return TreeChoice(0, rates, costs)
        if best in costs.trees:
            return TreeChoice(best, rates, costs)
        factor = measure(best)
        if factor is None:
            return TreeChoice(0, {0: chain}, costs, OTHER_BITS)
        costs = dataclasses.replace(costs, trees={**costs.trees, best: factor * costs.sd_round(k)})


def tree_round(costs: Costs, k: int, nodes: int) -> float:
    """Seconds of a round with a tree: as measured, or as guessed from its neighbours.

    Between two that are known hardware may charge by the row, or there may be a step, of a tile of
    rows: the guess is the mean of a line between them and of the smaller one. Beyond the largest
    that is known a further row costs what the last ones did, and in the chain what its verification
    shows.
    """
    known = {k: costs.sd_round(k), **{size: costs.trees[size] for size in sorted(costs.trees)}}
    sizes, seconds = list(known), list(known.values())
    if nodes in known:
        return known[nodes]
    if nodes < sizes[-1]:
        smaller = known[max(size for size in sizes if size < nodes)]
        return (float(np.interp(nodes, sizes, seconds)) + smaller) / 2
    if len(sizes) > 1:
        of_row = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    else:
        of_row = (costs.verify_seconds(k) - costs.verify_seconds(0)) / k
    return seconds[-1] + max(of_row, 0.0) * (nodes - sizes[-1])
