"""Verifications of all kinds of rows, for every backend of `kernels/verify`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ssd_jax.sampling import verification
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import VARIANTS
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

WIDTH, ROWS, VOCAB, TOKENS = 3, 4, 300, 290
TREE_WIDTH = 6
UNTRUNCATED = ({}, {"temperature": 0.0}, {"temperature": 0.5})
FIXED = hypothesis_settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # shrinking takes long
)
kinds_of_rows = st.lists(st.sampled_from(KINDS), min_size=WIDTH * ROWS, max_size=WIDTH * ROWS)
kinds_of_trees = st.lists(st.sampled_from(KINDS), min_size=TREE_WIDTH * 2, max_size=TREE_WIDTH * 2)


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


def case_of(kinds, seed, variant="truncated", vocab=VOCAB, width=WIDTH):
    """Arguments of `verify` with settings that a variant has."""
    of = {"greedy": ({"temperature": 0.0},), "sampled": UNTRUNCATED}.get(variant, SETTINGS)
    return arguments(kinds, vocab, seed, width=width, settings=of)


def reference(case, variant, rule, tokens=TOKENS, parents=None):
    """Outcomes by the definition."""
    law = {"tokens": tokens, "rule": rule, "parts": VARIANTS[variant], "parents": parents}
    return outcomes(verify(*case, backend="reference", **law))


def cases_of_size(vocab: int) -> tuple:
    """Rows of all kinds, of a size."""
    return case_of([*KINDS, *KINDS[:3]], vocab, vocab=vocab)


class Interpreted:
    """A backend in the interpreter of JAX.

    Args:
      interpret: makes the context in which kernels are interpreted.
    """

    def __init__(self, backend: str, interpret: Callable[[], AbstractContextManager]) -> None:
        self._backend, self._interpret = backend, interpret
        self.compiled = functools.cache(self._compiled)

    def _compiled(self, variant: str, rule: str, tokens: int):
        law = {"tokens": tokens, "rule": rule, "parts": VARIANTS[variant]}
        return jax.jit(functools.partial(verification.verify, backend=self._backend, **law))

    def outcomes(self, case, variant, rule, interpret=None, tokens=TOKENS, parents=None):
        """Outcomes of a case; `interpret` takes the place of the usual one."""
        with (interpret or self._interpret)():
            return outcomes(self.compiled(variant, rule, tokens)(*case, parents=parents))

    def assert_as_reference(self, case, variant="truncated", rule="ratio", **how) -> None:
        """The outcomes are those of the reference."""
        found = self.outcomes(case, variant, rule, **how)
        assert found == reference(case, variant, rule, **how)

    def law(self, case, backend: str | None = None) -> np.ndarray:
        """The law that is reported, of this backend or of another."""
        law = {"tokens": TOKENS, "parts": VARIANTS["truncated"]}
        with self._interpret():
            backend = backend or self._backend
            run = jax.jit(functools.partial(verification.target_probs, backend=backend, **law))
            return np.asarray(run(*case))

    def assert_laws_are_equal(self, times: int) -> None:
        """On rows of all kinds, and on some where top-k and top-p both cut."""
        cut_twice = ({"top_k": 40, "top_p": 0.8},)
        flat = arguments(["smooth"] * 3 * times, VOCAB, 1, width=WIDTH, settings=cut_twice)
        for case in (case_of([*KINDS[:6]] * times, 11), flat):
            expected, found = self.law(case, "xla"), self.law(case)
            np.testing.assert_array_equal(found > 0, expected > 0)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)

    def assert_thresholds_at(self, edges: Sequence[int], filters: dict) -> None:
        """The likeliest tokens, and equal ones at the threshold, are at the edges."""
        case = arguments(["smooth"] * 3, VOCAB, 5, width=WIDTH, settings=(filters,))
        logits = np.full((1, WIDTH, VOCAB), -9.0, np.float32)
        logits[..., edges] = 1.0
        logits[0, range(WIDTH), [127, 256, TOKENS - 1]] = 2.0
        case = (logits, *case[1:])
        found = self.law(case)
        np.testing.assert_array_equal(found > 0, logits > 0)
        np.testing.assert_allclose(found, self.law(case, "xla"), rtol=1e-6)
