"""Recursive rejection against its definition, token for token, by the same noise."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from ssd_jax.models.sharding import mesh_of
from ssd_jax.sampling import keys
from ssd_jax.sampling.judgement import nodes, recursive
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.params import NO_TOKEN
from tests.sampling.drawn_trees import NODES, ROWS, SETTINGS, VOCAB, case, ends, noise, outcome_of
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import slow_probs
from tests.selection import cases


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


@pytest.mark.parametrize("variant", ["any", "full"])
def test_every_tree_ends_as_the_definition_says(variant):
    expected = by_definition()
    assert {row for row, _ in expected} >= {*range(NODES)}
    assert ends(variant, "ratio") == expected


@pytest.mark.parametrize("variant", cases(["any", "full"], "full"))
def test_trees_end_alike_where_devices_share_the_vocabulary(variant):
    assert ends(variant, "ratio", mesh=mesh_of(jax.devices()[:4])) == by_definition()


@pytest.mark.parametrize("variant", cases(["any", "full"], "any"))
def test_a_tree_that_is_a_chain_ends_as_the_chain(variant):
    *example, parents = case(5, chains=True)
    tree, chain = (
        outcome_of(variant, example, "ratio", parents=shape) for shape in (parents, None)
    )
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
    outcome = outcome_of(variant, example, "ratio", parents=parents)
    nothing = proposal._replace(length=np.zeros(ROWS, np.int32))
    plain = outcome_of(variant, (logits, nothing, *others), "ratio", parents=parents)
    assert outcome.accepted.tolist() == [0] * ROWS
    assert outcome.bonus[::2].tolist() == plain.bonus[::2].tolist()
    assert set(outcome.bonus[1::2].tolist()) == {NO_TOKEN}


FAULTS = {
    "one uniform for siblings": Edit(
        nodes,
        "nodes_of",
        "uniforms_of_nodes(sampling, start, count)",
        "jnp.take_along_axis(uniforms_of_nodes(sampling, start, count), parents, axis=1)",
    ),
    "acceptance noise by depth": Edit(
        nodes,
        "nodes_of",
        "uniforms_of_nodes(sampling, start, count)",
        "jnp.take_along_axis(uniforms_of_nodes(sampling, start, count), "
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
        nodes, "first_child", "parents[:, None] == row", "parents[:, None] <= row"
    ),
    "p of the row before": Edit(recursive, "_step", "probs_at_row(row)", "probs_at_row(row - 1)"),
    "q of another row": Edit(
        recursive,
        "_step",
        "jnp.where(judged, accepted, now.is_first)",
        "jnp.where(judged, False, now.is_first)",
    ),
    "a node that was dropped": Edit(
        nodes, "nodes_of", "is_proposed(proposal) &", "(proposal.tokens >= 0) &"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault):
    with edited([fault]):
        found = ends("full", "ratio")
    assert found != by_definition()
