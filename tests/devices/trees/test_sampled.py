"""Sampled trees under the ratio rule: one shape, and the target's law."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.trees import continuations as tree_continuations
from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.sampling import siblings
from ssd_jax.sampling.judgement import nodes, recursive
from tests.devices.trees import simulation as tree_simulation
from tests.sampling.edits import Edit, edited
from tests.sampling.evidence import ALPHA
from tests.sampling.mutants import DRAFT, TARGET
from tests.sampling.simulation import Scenario
from tests.selection import cases

PLAIN = Scenario(target=TARGET, draft=DRAFT, count=3)
EXPOSING = Scenario(
    target=np.array([(0.4, 0.4, 0.2, 0.0)] * 4), draft=np.array([(0.1, 0.3, 0.6, 0.0)] * 4)
)
SCENARIOS = {
    "plain": PLAIN,
    "exposing": EXPOSING,
    "a q of two": Scenario(target=TARGET, draft=DRAFT, support=2, count=3),
    "penalties": Scenario(
        target=TARGET,
        draft=DRAFT,
        settings=({"presence_penalty": 1.0}, {"temperature": 0.0}, {"top_p": 0.75}, {"top_k": 2}),
        count=3,
    ),
    "zeros": Scenario(
        target=np.array([[0.0, 0.5, 0.5, 0.0], [0.2, 0.0, 0.0, 0.8], *[[0.1, 0.4, 0.4, 0.1]] * 2]),
        draft=np.array([[0.7, 0.2, 0.0, 0.1], [0.0, 0.0, 1.0, 0.0], [0.25] * 4, [0.4, 0.6, 0, 0]]),
    ),
}


@pytest.mark.parametrize("name", cases(SCENARIOS, "penalties"))
def test_texts_of_sampled_trees_follow_the_law(name):
    assert tree_simulation.p_value(SCENARIOS[name], seed=1) > ALPHA


def test_the_shape_is_the_same_whatever_was_drawn():
    parents, lengths, ranks = [], [], []
    for name in ("plain", "zeros"):
        for done in itertools.islice(tree_simulation.rounds(SCENARIOS[name], seed=2), 2):
            parents.append(np.asarray(done.tree.parents))
            lengths.append(np.asarray(done.tree.proposal.length))
            ranks.append(np.asarray(done.tree.rank))
    assert np.unique(np.concatenate(parents), axis=0).tolist() == [[0, 0, 0, 1, 1, 2]]
    assert np.unique(np.concatenate(ranks), axis=0).tolist() == [[0, 1, 2, 0, 1, 0]]
    assert set(np.concatenate(lengths).tolist()) == {tree_simulation.SHAPE.nodes}


def test_siblings_differ_and_come_from_the_q_that_is_kept():
    done = next(tree_simulation.rounds(SCENARIOS["a q of two"], seed=3))
    tokens, support = np.asarray(done.tree.proposal.tokens), np.asarray(done.tree.proposal.support)
    assert (tokens[:, 0] != tokens[:, 1]).all()
    assert (tokens[:, 3] != tokens[:, 4]).all()
    for node in (0, 1, 3, 4, 5):
        assert (support[:, node] == tokens[:, node, None]).any(axis=1).all()
    assert (support[:, :2] == support[:, :1]).all()


@pytest.mark.parametrize(("nodes", "depth"), [(16, 4), (31, 8), (16, 12)])
def test_every_node_that_is_run_has_noise_of_its_own(nodes, depth):
    shape = TreeShape(nodes=nodes, depth=depth)
    start, numbers = jnp.zeros(1, jnp.int32), []
    for at in range(depth):
        place = tree_continuations.places(start, jnp.asarray(at), shape.width if at else 1, shape)
        assert place.depth.tolist() == [at] * len(place.depth)
        assert int(place.number[0]) == at
        numbers += place.number.tolist()
    assert len(set(numbers)) == len(numbers) == shape.runs + 1


FAULTS = {
    "a child removed after it was sampled": Edit(
        tree_continuations,
        "continuations",
        "jnp.where(hot, siblings,",
        "jnp.where(hot, jnp.where(drawn.tokens == 0, -1, drawn.tokens),",
    ),
    "siblings sorted after they were sampled": Edit(
        siblings,
        "draw_siblings",
        "top_k(scores, min(count, support))",
        "top_k(scores, min(count, support))\n        index = -jnp.sort(-index)",
    ),
    "siblings with replacement, judged without": Edit(
        siblings,
        "draw_siblings",
        "best, index = jax.lax.top_k(scores, min(count, support))",
        "keyed = [keys.derive(sampling.seed, sampling.request, place.start + i, place.number, "
        "Purpose.BONUS) for i in range(count)]\n"
        "        index = jnp.stack([jnp.argmax(jnp.log(q) + keys.gumbel_of(key, ids), axis=1) "
        "for key in keyed], axis=1)\n"
        "        best = jnp.zeros(index.shape)",
    ),
    "the noise of the start alone": Edit(
        siblings, "draw_siblings", "place.number, Purpose", "place.depth * 0, Purpose"
    ),
    "q of another run": Edit(
        tree_growth,
        "propose",
        "jnp.take_along_axis(growth.q, parent_run[:, :, None], axis=1)",
        "jnp.take_along_axis(growth.q, 0 * parent_run[:, :, None], axis=1)",
    ),
    "one uniform for siblings": Edit(
        nodes,
        "nodes_of",
        "uniforms_of_nodes(sampling, start, count)",
        "jnp.take_along_axis(uniforms_of_nodes(sampling, start, count), parents, axis=1)",
    ),
    "a residual that is not renormalised": Edit(recursive, "_step", "[:, 0] / now.total", "[:, 0]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_change_the_law(fault):
    scenario = PLAIN if fault == "q of another run" else EXPOSING
    with edited([FAULTS[fault]]):
        using = tree_simulation.build(tree_simulation.SHAPE, scenario.support)
        assert tree_simulation.p_value(scenario, 1, using) <= ALPHA
