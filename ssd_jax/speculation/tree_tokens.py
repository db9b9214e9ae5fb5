"""Tokens that a round with a token tree, or with the chain of its depth, is expected to commit.

Trees are grown as a draft grows them (`devices/trees/growth.py`), from nodes whose classes are
drawn independently: how often each class comes is not counted, since a tree shows no node beside
its path, but follows from the share of first-ranked tokens that the target takes. Pure host code.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from ssd_jax.roles.drafting import TreeShape

_TREES, _SEED = 256, 0
_HALVINGS, _STEEPEST = 40, 16.0


def class_shares(
    first: Float[np.ndarray, "classes"], acceptance: float
) -> Float[np.ndarray, "classes"]:
    """Shares of the classes with which first-ranked tokens are accepted this often.

    Of all such shares these are the ones nearest to equal ones: they grow or fall by the same
    factor from class to class.

    Args:
      first: rate of first-ranked tokens, by class.
      acceptance: the rate of all; one that no shares have gives the nearest that some have.
    """
    low, high = -_STEEPEST, _STEEPEST
    shares = np.full(len(first), 1 / len(first))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        powers = middle * np.arange(len(first))
        shares = np.exp(powers - powers.max())
        shares /= shares.sum()
        low, high = (middle, high) if shares @ first < acceptance else (low, middle)
    return shares


def chain_tokens(acceptance: float, depth: int) -> float:
    """Expected tokens of a round with a chain, bonus included."""
    return sum(acceptance**place for place in range(depth + 1))


def tree_tokens(
    rates: Float[np.ndarray, "classes ranks"], acceptance: float, shape: TreeShape
) -> float:
    """Expected tokens of a round with a tree, bonus included.

    Args:
      rates: how often the target's token has a rank, by class of the node; see `RankRates`.
      acceptance: share of first-ranked tokens that the target takes.
    """
    tree, _ = _simulated(rates, acceptance, shape)
    return 1 + float(tree.sum(axis=1).mean())


def hit_rates(
    rates: Float[np.ndarray, "classes ranks"], acceptance: float, shape: TreeShape, branches: int
) -> tuple[float, float]:
    """How often one of M branches has the outcome: of a tree, and of a round of one token.

    Args:
      rates, acceptance: see `tree_tokens`.
      branches: M.
    """
    _, frontier = _simulated(rates, acceptance, shape)
    best = -np.sort(-frontier, axis=1)[:, :branches]
    shares = class_shares(rates[:, 0], acceptance)
    alone = -np.sort(-rates, axis=1)[:, :branches].sum(axis=1)
    return float(best.sum(axis=1).mean()), float(shares @ alone)


def _simulated(
    rates: Float[np.ndarray, "classes ranks"], acceptance: float, shape: TreeShape
) -> tuple[Float[np.ndarray, "trees nodes"], Float[np.ndarray, "trees outcomes"]]:
    """The probability that the target's text comes through each node of trees, and that it leaves
    them by each token that the draft has ranked."""
    shares = class_shares(rates[:, 0], acceptance)
    generator = np.random.default_rng(_SEED)

    def behind(scores: Float[np.ndarray, "trees nodes"]) -> Float[np.ndarray, "trees n"]:
        classes = generator.choice(len(shares), size=scores.shape, p=shares)
        return (scores[:, :, None] * rates[classes]).reshape(_TREES, -1)

    run, candidates, has_run = np.ones((_TREES, 1)), [], []
    for depth in range(1, shape.depth + 1):
        children = -np.sort(-behind(run), axis=1)
        run = children[:, : shape.width]
        candidates.append(children)
        places = np.arange(children.shape[1])
        has_run.append((places < shape.width) & (depth < shape.depth))
    all_candidates, all_run = np.concatenate(candidates, axis=1), np.concatenate(has_run)
    order = np.argsort(-all_candidates, axis=1, kind="stable")
    in_tree, outside = order[:, : shape.nodes], order[:, shape.nodes :]
    tree = np.take_along_axis(all_candidates, in_tree, axis=1)
    leaves = np.where(all_run[in_tree], 0.0, tree)
    others = np.take_along_axis(all_candidates, outside, axis=1)
    return tree, np.concatenate([others, behind(leaves)], axis=1)
