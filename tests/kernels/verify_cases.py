"""Verifications of all kinds of rows, for every backend of `kernels/verify`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np

from ssd_jax.sampling import verification
from ssd_jax.sampling.proposal import Proposal
from tests.sampling.rows import QUICKLY, empty_history, rows
from tests.sampling.trees import random_parents

SETTINGS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 3},
    {"top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.05},
    {"top_k": 20, "top_p": 0.6, "min_p": 0.02},
    {"temperature": 0.3, "top_p": 0.5},
)
"""Of rows, in turn."""

KINDS = ("smooth", "peaked", "steps", "equal", "banned", "one left", "NaN", "infinite", "nothing")
"""Kinds of rows of logits."""


def logits_of(kind: str, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Logits [V]."""
    smooth = rng.normal(0, 2, vocab).astype(np.float32)
    best = rng.permutation(vocab)
    if kind == "peaked":
        smooth[best[: max(vocab // 50, 2)]] += 9
    elif kind == "steps":  # ties at every threshold
        smooth = np.round(smooth)
    elif kind == "equal":
        smooth[:] = rng.normal()
    elif kind == "banned":
        smooth[best[: vocab * 3 // 4]] = -np.inf
    elif kind == "one left":
        smooth[best[1:]] = -np.inf
    elif kind == "NaN":
        smooth[best[0]] = np.nan
    elif kind == "infinite":
        smooth[best[0]] = np.inf
    elif kind == "nothing":
        smooth[:] = -np.inf
    return smooth


def arguments(
    kinds: Sequence[str],
    vocab: int,
    seed: int,
    *,
    width: int,
    support: int = 8,
    settings: Sequence[dict] = SETTINGS,
) -> tuple:
    """Arguments of `verify`: a row of `width` positions for so many kinds.

    Proposed tokens are likely ones, so that some are accepted, and some are none of their q.
    """
    rng = np.random.default_rng(seed)
    logits = np.stack([logits_of(kind, vocab, rng) for kind in kinds]).reshape(-1, width, vocab)
    batch, count = len(logits), width - 1
    likely = np.argsort(-np.nan_to_num(logits[:, :count]), axis=-1)[..., :support]
    q = rng.random(likely.shape).astype(np.float32) ** 3
    q /= q.sum(axis=-1, keepdims=True)
    choice = rng.integers(0, max(support // 2, 1), (batch, count, 1))
    tokens = np.take_along_axis(likely, choice, axis=-1)[..., 0]
    proposal = Proposal(
        tokens.astype(np.int32),
        rng.integers(count // 2, count + 1, batch).astype(np.int32),
        np.where(q > 0.01, likely, -1).astype(np.int32),
        np.where(q > 0.01, q, 0),
    )
    chosen = [
        settings[(seed + row) % len(settings)] | {"seed": (seed % 2**32, 0), "request": row}
        for row in range(batch)
    ]
    start = rng.integers(0, 100, batch).astype(np.int32)
    return logits, proposal, rows(*chosen), start, empty_history(batch, vocab)


def as_trees(case: tuple, seed: int) -> tuple[tuple, np.ndarray]:
    """The case with a random tree of as many nodes in every row, and the parents [B, m].

    Siblings are different ids of the q of their parent, in its order; those that it is too small
    for have the token 0.
    """
    logits, proposal, *others = case
    parents = random_parents(np.random.default_rng(seed), *proposal.tokens.shape)
    every = np.arange(len(parents))[:, None]
    support, q = proposal.support[every, parents], proposal.q[every, parents]
    place = np.tril(parents[:, :, None] == parents[:, None], -1).sum(axis=2)  # among siblings
    in_order = np.take_along_axis(support, np.argsort(support < 0, axis=-1, kind="stable"), axis=-1)
    tokens = np.take_along_axis(in_order, place[:, :, None], axis=-1)[..., 0]
    tree = Proposal(np.maximum(tokens, 0), proposal.length, support, q)
    return (logits, tree, *others), parents


@functools.partial(
    jax.jit, static_argnames=("tokens", "rule", "parts", "backend"), compiler_options=QUICKLY
)
def verify(*arguments, **law):
    """`verification.verify`, compiled."""
    return verification.verify(*arguments, **law)


def outcomes(found) -> list[tuple[int, int, int]]:
    """Of each row."""
    return list(zip(*(array.tolist() for array in found), strict=True))
