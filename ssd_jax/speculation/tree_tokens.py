"""Tokens that a round with a token tree, or with the chain of its depth, is expected to commit.

Trees are grown as a draft grows them (`devices.tree_growth`), from nodes whose classes are drawn
independently: how often each class comes is not counted, since a tree shows no node beside its
path, but follows from the share of first-ranked tokens that the target takes. Pure host code.
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
    shares = class_shares(rates[:, 0], acceptance)
    generator = np.random.default_rng(_SEED)
    scores, candidates = np.ones((_TREES, 1)), []
    for _ in range(shape.depth):
        classes = generator.choice(len(shares), size=scores.shape, p=shares)
        children = (scores[:, :, None] * rates[classes]).reshape(_TREES, -1)
        candidates.append(children)
        scores = -np.sort(-children, axis=1)[:, : shape.width]
    best = -np.sort(-np.concatenate(candidates, axis=1), axis=1)[:, : shape.nodes]
    return 1 + float(best.sum(axis=1).mean())
