"""Trees that were drawn from a sparse q, and how the code judges them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS
from ssd_jax.sampling import keys, verification
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import VARIANTS
from tests.sampling.rows import QUICKLY, empty_history, rows
from tests.sampling.trees import random_parents

ROWS, NODES, VOCAB, N = 240, 9, 12, 5
SETTINGS = ({}, {"temperature": 0.7, "top_k": 8}, {"top_p": 0.9}, {"min_p": 0.05})


@functools.cache
def case(nodes: int = NODES, chains: bool = False):
    """Logits [rows, m + 1, V] and trees of 0 to m nodes, drawn from a q near p, sparse.

    Siblings are drawn without replacement; those that q is too small for have the token 0.
    """
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1.5, (ROWS, nodes + 1, VOCAB)).astype(np.float32)
    near = logits + rng.normal(0, 0.8, logits.shape)
    support = np.argsort(-near, axis=-1)[..., :N].astype(np.int32)
    weights = np.exp(np.take_along_axis(near, support, axis=-1))
    weights[:, ::4, 2:] = 0  # rows whose q has two tokens
    q = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    with np.errstate(divide="ignore"):
        scores = np.log(q) + rng.gumbel(size=q.shape)
    drawn = np.take_along_axis(support, np.argsort(-scores, axis=-1), axis=-1)
    parents = random_parents(rng, ROWS, nodes)
    if chains:
        parents = np.tile(np.arange(nodes, dtype=np.int32), (ROWS, 1))
    tokens = np.zeros((ROWS, nodes), np.int32)
    for row in range(ROWS):
        for parent in range(nodes):
            siblings = np.flatnonzero(parents[row] == parent)[: (q[row, parent] > 0).sum()]
            tokens[row, siblings] = drawn[row, parent, : len(siblings)]
    length = rng.integers(0, nodes + 1, ROWS).astype(np.int32)
    sampling = rows(*(SETTINGS[row % len(SETTINGS)] | {"request": row} for row in range(ROWS)))
    start = rng.integers(0, 1000, ROWS).astype(np.int32)
    every = np.arange(ROWS)[:, None]
    q_of_parent = np.where(q > 0, support, -1)[every, parents], q[every, parents]
    return logits, Proposal(tokens, length, *q_of_parent), sampling, start, parents


def noise(row: int, position: int, purpose: Purpose) -> keys.Key:
    _, _, sampling, start, _ = case()
    at = (jnp.asarray([value], jnp.int32) for value in (start[row], position))
    return keys.derive(
        jnp.asarray(sampling.seed[row : row + 1]),
        jnp.asarray(sampling.request[row : row + 1]),
        *at,
        purpose,
    )


def outcome_of(variant: str, example, rule: str, mesh: Mesh | None = None, parents=None):
    """The outcome by the code, compiled from what its functions are now."""
    law = {"tokens": VOCAB, "rule": rule, "parts": VARIANTS[variant]}

    def judge(logits, proposal, sampling, start, history, parents):
        return verification.verify(
            logits, proposal, sampling, start, history, parents=parents, **law
        )

    logits, *others = example
    if mesh is not None:  # as programs of a target
        replicated = PartitionSpec()
        specs = {"in_specs": replicated, "out_specs": replicated, "axis_names": {DATA_AXIS}}
        judge = jax.shard_map(judge, mesh=mesh, check_vma=False, **specs)
        columns = NamedSharding(mesh, PartitionSpec(None, None, TENSOR_AXIS))
        logits = jax.device_put(logits, columns)
    compiled = jax.jit(judge, compiler_options=QUICKLY)
    return compiled(logits, *others, empty_history(len(logits), VOCAB), parents)


def ends(variant: str, rule: str, mesh: Mesh | None = None) -> list[tuple[int, int]]:
    """(row of the last accepted node, t*) of each sequence."""
    *example, parents = case()
    outcome = outcome_of(variant, example, rule, mesh, parents)
    last = [path.bit_length() for path in outcome.path.tolist()]
    assert outcome.accepted.tolist() == [path.bit_count() for path in outcome.path.tolist()]
    return list(zip(last, outcome.bonus.tolist(), strict=True))
