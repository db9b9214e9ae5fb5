"""Traversal verification against its definition, token for token, by the same noise."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from ssd_jax.models.sharding import mesh_of
from ssd_jax.sampling import keys
from ssd_jax.sampling.judgement import nodes, traversal
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.params import NO_TOKEN
from tests.sampling.drawn_trees import NODES, ROWS, SETTINGS, VOCAB, case, ends, noise, outcome_of
from tests.sampling.edits import Edit, edited
from tests.sampling.reference import slow_probs
from tests.selection import cases

RULE = "block"


@functools.cache
def by_definition() -> list[tuple[int, int]]:
    """(row of the last accepted node, t*) of each sequence in float64."""
    return [end_of(row) for row in range(ROWS)]


def end_of(sequence: int) -> tuple[int, int]:
    logits, proposal, _, start, parents = case()
    setting = SETTINGS[sequence % len(SETTINGS)]
    nodes = range(int(proposal.length[sequence]))
    tokens = proposal.tokens[sequence]
    children = {
        row: [node for node in nodes if parents[sequence, node] == row] for row in range(NODES + 1)
    }
    p = {row: slow_probs(logits[sequence, row], **setting) for row in children}
    q, survival, path = {}, {0: 1.0}, [0]
    for row, behind in children.items():
        q[row] = np.zeros(VOCAB)
        if behind:
            ids = proposal.support[sequence, behind[0]]
            q[row][ids[ids >= 0]] = proposal.q[sequence, behind[0]][ids >= 0]
    while True:
        row = path[-1]
        if children[row]:
            node = children[row][0]
            x = tokens[node]
            share = q[row][x] / max(q[row].sum(), 1e-300)
            survival[node + 1] = min(1.0, survival[row] * p[row][x] / share) if share else 0.0
            path.append(node + 1)
            continue
        node = row - 1
        position = start[sequence] + 1 + node
        u = float(keys.uniform(noise(sequence, position, Purpose.ACCEPT))[0])
        if row == 0 or u < survival[row]:
            break
        path.pop()
        above = path[-1]
        children[above].pop(0)
        total, a = q[above].sum(), survival[above]
        surplus = np.maximum(a * p[above] - q[above] / (total or 1.0), 0)
        q[above][tokens[node]] = 0
        if a < 1:
            survival[above] = surplus.sum() / (surplus.sum() + 1 - a)
        if surplus.sum() > 0:
            p[above] = surplus / surplus.sum()
    key = noise(sequence, start[sequence] + len(path), Purpose.BONUS)
    with np.errstate(divide="ignore"):
        scores = np.log(p[row]) + np.asarray(keys.gumbel(key, VOCAB)[0])
    return row, int(np.argmax(scores))


@pytest.mark.parametrize("variant", ["any", "full"])
def test_every_tree_ends_as_the_definition_says(variant):
    expected = by_definition()
    assert {row for row, _ in expected} >= {*range(NODES)}
    assert ends(variant, RULE) == expected


@pytest.mark.parametrize("variant", cases(["any", "full"], "full"))
def test_trees_end_alike_where_devices_share_the_vocabulary(variant):
    assert ends(variant, RULE, mesh=mesh_of(jax.devices()[:4])) == by_definition()


@pytest.mark.parametrize("variant", cases(["any", "full"], "full"))
def test_a_tree_that_is_a_chain_ends_as_under_block_verification(variant):
    *example, parents = case(5, chains=True)
    tree, chain = (outcome_of(variant, example, RULE, parents=shape) for shape in (parents, None))
    for one, other in zip(tree, chain, strict=True):
        assert one.tolist() == other.tolist()
    assert tree.accepted.max() == 5


@pytest.mark.parametrize("variant", cases(["any", "full"], "full"))
def test_a_q_that_is_no_number_gives_p_and_logits_that_are_none_give_no_token(variant):
    logits, proposal, *others, parents = case()
    q = np.where(np.arange(ROWS)[:, None, None] % 2 == 0, np.nan, proposal.q)
    damaged = logits.copy()
    damaged[1::2, 0, 3] = np.nan
    example = damaged, proposal._replace(q=q), *others
    outcome = outcome_of(variant, example, RULE, parents=parents)
    nothing = proposal._replace(length=np.zeros(ROWS, np.int32))
    plain = outcome_of(variant, (logits, nothing, *others), RULE, parents=parents)
    assert outcome.accepted.tolist() == [0] * ROWS
    assert outcome.bonus[::2].tolist() == plain.bonus[::2].tolist()
    assert set(outcome.bonus[1::2].tolist()) == {NO_TOKEN}


def test_a_tree_ends_where_logits_are_no_numbers_as_often_as_a_text_comes_there():
    """Else the texts that go on would not be those of plain decoding."""
    logits, proposal, *others, parents = case()
    damaged, sound = logits.copy(), by_definition()
    damaged[:, 1:] = np.nan
    length = np.minimum(proposal.length, 1).astype(np.int32)
    one = proposal._replace(length=length)
    plain = outcome_of("full", (logits, one, *others), RULE, parents=parents)
    outcome = outcome_of("full", (damaged, one, *others), RULE, parents=parents)
    assert outcome.accepted.tolist() == plain.accepted.tolist()
    assert 0 < sum(outcome.accepted.tolist()) < length.sum() < len(sound)
    ended = np.asarray(outcome.accepted) == 1
    assert set(np.asarray(outcome.bonus)[ended].tolist()) == {NO_TOKEN}


FAULTS = {
    "one uniform for siblings": Edit(
        nodes,
        "nodes_of",
        "uniforms_of_nodes(sampling, start, count)",
        "jnp.take_along_axis(uniforms_of_nodes(sampling, start, count), parents, axis=1)",
    ),
    "acceptance noise of the row": Edit(
        nodes, "uniforms_of_nodes", "start[row] + 1 + jnp", "start[row] + 2 + jnp"
    ),
    "the product of odds without a cap": Edit(
        traversal,
        "_survival",
        "jnp.minimum(odds / jnp.where(q > 0, q, 1.0), 1.0)",
        "odds / jnp.where(q > 0, q, 1.0)",
    ),
    "the residual of the whole p": Edit(
        traversal, "_without", "a[:, None] * p - q / divisor", "p - q / divisor"
    ),
    "p elsewhere as it was": Edit(
        traversal, "_without", "jnp.where(changes, further / safe, scale)", "scale"
    ),
    "a row that survives as before": Edit(
        traversal, "_without", "& (a < 1), s /", "& (a < 0), s /"
    ),
    "siblings with replacement": Edit(
        traversal, "_without", "[:, None], 0.0, q)", "[:, None], q, q)"
    ),
    "q that is not renormalised": Edit(
        traversal, "_without", "jnp.where(total > 0, total, 1.0)", "jnp.ones_like(total)"
    ),
    "odds of a q that is not renormalised": Edit(traversal, "_survival", " * p * total", " * p"),
    "what a parent was before": Edit(traversal, "_step", "changed(now.p, left.p)", "now.p"),
    "a wrong parent": Edit(
        nodes, "first_child", "parents[:, None] == row", "parents[:, None] <= row"
    ),
    "p of the pending token": Edit(
        traversal, "judge", "(count + 1) + end.row", "(count + 1) + 0 * end.row"
    ),
    "a node that was dropped": Edit(
        nodes, "nodes_of", "is_proposed(proposal) &", "(proposal.tokens >= 0) &"
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_are_caught(fault):
    with edited([fault]):
        found = ends("full", RULE)
    assert found != by_definition()
