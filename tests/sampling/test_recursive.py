"""Recursive rejection against its definition, token for token, by the same noise."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.models.sharding import DATA_AXIS, TENSOR_AXIS, mesh_of
from ssd_jax.sampling import keys, verification
from ssd_jax.sampling.judgement import recursive
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import VARIANTS
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import slow_probs
from tests.sampling.rows import QUICKLY, nothing_said, rows
from tests.sampling.trees import random_parents
from tests.selection import cases

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


@functools.cache
def by_definition() -> list[tuple[int, int]]:
    """(row of the last accepted node, t*) of each sequence in float64."""
    logits, proposal, _, start, parents = case()
    found = []
    for row, length in enumerate(proposal.length.tolist()):
        setting = SETTINGS[row % len(SETTINGS)]
        at, depth, taken = 0, 0, True
        while taken:
            taken = False
            p, q = slow_probs(logits[row, at], **setting), None
            for node in np.flatnonzero(parents[row, :length] == at).tolist():
                if q is None:
                    q, ids = np.zeros(VOCAB), proposal.support[row, node]
                    q[ids[ids >= 0]] = proposal.q[row, node][ids >= 0]
                x = proposal.tokens[row, node]
                if q.sum() == 0:
                    continue  # the draft had no more
                u = float(keys.uniform(noise(row, start[row] + 1 + node, Purpose.ACCEPT))[0])
                if u < p[x] / (q[x] / q.sum()):
                    at, depth, taken = node + 1, depth + 1, True
                    break
                p = np.maximum(p - q / q.sum(), 0)
                p, q[x] = p / p.sum(), 0
        gumbel = keys.gumbel(noise(row, start[row] + 1 + depth, Purpose.BONUS), VOCAB)[0]
        with np.errstate(divide="ignore"):
            found.append((at, int(np.argmax(np.log(p) + np.asarray(gumbel)))))
    return found


def outcome_of(variant: str, example, mesh: Mesh | None = None, rule="ratio", parents=None):
    """The outcome by the code, compiled from what its functions are now."""
    law = {"tokens": VOCAB, "rule": rule, "parts": VARIANTS[variant]}

    def judge(logits, proposal, sampling, start, said, parents):
        return verification.verify(logits, proposal, sampling, start, said, parents=parents, **law)

    logits, *others = example
    if mesh is not None:  # as programs of a target
        whole = PartitionSpec()
        specs = {"in_specs": whole, "out_specs": whole, "axis_names": {DATA_AXIS}}
        judge = jax.shard_map(judge, mesh=mesh, check_vma=False, **specs)
        columns = NamedSharding(mesh, PartitionSpec(None, None, TENSOR_AXIS))
        logits = jax.device_put(logits, columns)
    compiled = jax.jit(judge, compiler_options=QUICKLY)
    return compiled(logits, *others, nothing_said(len(logits), VOCAB), parents)


def ends(variant: str, mesh: Mesh | None = None) -> list[tuple[int, int]]:
    *example, parents = case()
    outcome = outcome_of(variant, example, mesh, parents=parents)
    last = [path.bit_length() for path in outcome.path.tolist()]
    assert outcome.accepted.tolist() == [path.bit_count() for path in outcome.path.tolist()]
    return list(zip(last, outcome.bonus.tolist(), strict=True))


@pytest.mark.parametrize("variant", ["any", "full"])
def test_every_tree_ends_as_the_definition_says(variant):
    expected = by_definition()
    assert {row for row, _ in expected} >= {*range(NODES)}
    assert ends(variant) == expected


@pytest.mark.parametrize("variant", cases(["any", "full"], "full"))
def test_trees_end_alike_where_devices_share_the_vocabulary(variant):
    assert ends(variant, mesh=mesh_of(jax.devices()[:4])) == by_definition()


@pytest.mark.parametrize("variant", cases(["any", "full"], "any"))
def test_a_tree_that_is_a_chain_ends_as_the_chain(variant):
    *example, parents = case(5, chains=True)
    tree, chain = (outcome_of(variant, example, parents=each) for each in (parents, None))
    for one, other in zip(tree, chain, strict=True):
        assert one.tolist() == other.tolist()
    assert tree.accepted.max() == 5


@pytest.mark.parametrize("variant", cases(["any", "full"], "any"))
def test_a_q_that_is_no_number_gives_p_and_logits_that_are_none_give_no_token(variant):
    logits, proposal, *others, parents = case()
    q = np.where(np.arange(ROWS)[:, None, None] % 2 == 0, np.nan, proposal.q)
    damaged = logits.copy()
    damaged[1::2, 0, 3] = np.nan
    example = damaged, proposal._replace(q=q), *others
    outcome = outcome_of(variant, example, parents=parents)
    nothing = proposal._replace(length=np.zeros(ROWS, np.int32))
    plain = outcome_of(variant, (logits, nothing, *others), parents=parents)
    assert outcome.accepted.tolist() == [0] * ROWS
    assert outcome.bonus[::2].tolist() == plain.bonus[::2].tolist()
    assert set(outcome.bonus[1::2].tolist()) == {NO_TOKEN}


FAULTS = {
    "one uniform for siblings": Edit(
        recursive,
        "judge",
        "_uniforms(sampling, start, count)",
        "jnp.take_along_axis(_uniforms(sampling, start, count), parents, axis=1)",
    ),
    "acceptance noise by depth": Edit(
        recursive,
        "judge",
        "_uniforms(sampling, start, count)",
        "jnp.take_along_axis(_uniforms(sampling, start, count), "
        "topology.depth_of(topology.paths(parents))[:, 1:] - 1, axis=1)",
    ),
    "a residual that is not renormalised": Edit(
        recursive, "_step", "now.weights / now.total[:, None] - law", "now.weights - law"
    ),
    "p that is not renormalised": Edit(recursive, "_step", "[:, 0] / now.total", "[:, 0]"),
    "siblings with replacement": Edit(recursive, "_step", "jnp.where(is_token, 0.0, q)", "q"),
    "q that is not renormalised": Edit(
        recursive,
        "_step",
        "jnp.where(now.q_total > 0, now.q_total, 1.0)",
        "jnp.ones_like(now.q_total)",
    ),
    "no residual": Edit(recursive, "_step", "changes = rejected & ", "changes = ~judged & "),
    "a wrong parent": Edit(
        recursive, "_next_child", "nodes.parents == row[:, None]", "nodes.parents <= row[:, None]"
    ),
    "p of the row before": Edit(recursive, "_step", "probs_at_row(row)", "probs_at_row(row - 1)"),
    "q of another row": Edit(
        recursive,
        "_step",
        "jnp.where(judged, accepted, now.is_first)",
        "jnp.where(judged, False, now.is_first)",
    ),
    "a node that was dropped": Edit(
        recursive, "judge", "is_proposed(proposal) &", "(proposal.tokens >= 0) &"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault):
    with edited([fault]):
        found = ends("full")
    assert found != by_definition()
