"""Trees grow as a search over paths says that they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.devices.trees.growth import Continuations, Frontier
from ssd_jax.roles.drafting import GAP_CLASSES, RANKS, TreeShape
from ssd_jax.sampling.ranking import Ranking
from tests.sampling.trees import path_of

ROWS, VOCAB = 12, 50
START = 40


def continuations(row: int, path: tuple[int, ...], ranks: int) -> tuple[list[int], int]:
    """What a draft says behind a path: tokens, best first, of which some are missing; the class."""
    rng = np.random.default_rng([row, *path])
    tokens = rng.permutation(VOCAB)[:ranks].tolist()
    missing = int(rng.integers(0, 3))
    return tokens[: ranks - missing] + [-1] * missing, int(rng.integers(0, GAP_CLASSES))


def searched(row: int, shape: TreeShape, log_rates: np.ndarray, limit: int) -> dict:
    """Path -> score of the nodes of the best tree, and the paths that the draft runs."""
    candidates: dict[tuple[int, ...], float] = {}
    ran = [()]

    def run(path: tuple[int, ...]) -> None:
        tokens, gap_class = continuations(row, path, shape.ranks)
        for rank, token in enumerate(tokens):
            if token >= 0 and len(path) < limit:
                rate = log_rates[len(path), gap_class, rank]
                candidates[*path, token] = np.float32(candidates.get(path, 0) + rate)

    run(())
    for depth in range(1, min(shape.depth, limit)):
        best = sorted((p for p in candidates if len(p) == depth), key=lambda p: -candidates[p])
        for path in best[: shape.width]:
            run(path)
            ran.append(path)
    nodes = sorted(candidates, key=lambda p: -candidates[p])[: shape.nodes]
    return {"nodes": {path: candidates[path] for path in nodes}, "ran": ran}


def grown(shape: TreeShape, log_rates: np.ndarray, limit: np.ndarray):
    """The growth and the proposal of ROWS rows."""
    growth = jax.jit(tree_growth.empty, static_argnums=(0, 1))(ROWS, shape)
    start = np.where(limit > 0, START, -1).astype(np.int32)
    growth = growth._replace(start=jnp.asarray(start), limit=jnp.asarray(limit))
    add = jax.jit(functools.partial(tree_growth.add_run, shape=shape))
    choose = jax.jit(functools.partial(tree_growth.frontier, shape=shape))
    nothing = jnp.full((ROWS, 1), -1)
    ran = Frontier(jnp.zeros((ROWS, 1), jnp.int32), nothing, jnp.zeros((ROWS, 1), jnp.int32))
    for depth in range(shape.depth):
        if depth:
            ran = choose(growth, jnp.array(depth))
        rankings = [
            continuations(row, tuple(path), shape.ranks)
            for row, paths in enumerate(run_paths(growth, ran, depth))
            for path in paths
        ]
        tokens, classes = zip(*rankings, strict=True)
        ranking, count = Ranking(jnp.array(tokens), jnp.array(classes)), len(rankings)
        support = jnp.zeros((count, 1), jnp.int32)
        behind = Continuations(ranking, support, jnp.ones((count, 1)))
        growth = add(growth, ran, behind, jnp.array(depth), jnp.asarray(log_rates))
    propose = jax.jit(functools.partial(tree_growth.propose, shape=shape))
    return growth, propose(growth)


def run_paths(growth, ran: Frontier, depth: int) -> list[list[list[int]]]:
    """The tokens on the path to each node of a frontier."""
    tokens = np.asarray(growth.runs.token)
    paths = []
    for row in range(ROWS):
        paths.append([])
        for token, path in zip(ran.tokens[row].tolist(), ran.path[row].tolist(), strict=True):
            before = [run + 1 for run in range(31) if path >> run & 1][:-1]
            paths[-1].append([*tokens[row, before].tolist(), token] if depth else [])
    return paths


def rates(rng, shape: TreeShape) -> np.ndarray:
    """Different log rates of every depth, class and rank, for all rows."""
    size = 1, shape.depth, GAP_CLASSES, shape.ranks
    table = np.log(np.sort(rng.uniform(0.01, 0.9, size))[..., ::-1])
    return np.repeat(table, ROWS, axis=0).astype(np.float32)


@pytest.mark.parametrize(("nodes", "depth"), [(2, 1), (8, 2), (16, 4), (16, 12), (31, 8)])
def test_the_tree_has_the_best_nodes_of_the_search(nodes, depth):
    shape = TreeShape(nodes=nodes, depth=depth)
    log_rates = rates(np.random.default_rng(nodes), shape)
    limit = np.resize([depth, 1, depth, max(depth - 1, 1), 0], ROWS).astype(np.int32)
    proposal = grown(shape, log_rates, limit)[1]
    for row in range(ROWS):
        length = int(proposal.proposal.length[row])
        parents = np.asarray(proposal.parents[row])
        tokens = np.asarray(proposal.proposal.tokens[row])
        paths = [tuple(tokens[path_of(parents, i + 1)].tolist()) for i in range(length)]
        best = searched(row, shape, log_rates[0], int(limit[row]))
        assert sorted(paths) == sorted(best["nodes"] if limit[row] else [])
        assert all(parent <= i for i, parent in enumerate(parents.tolist()))
        assert (parents[length:] == 0).all()
        ran = set(best["ran"])
        assert [run >= 0 for run in proposal.run[row, 1 : length + 1].tolist()] == [
            path in ran for path in paths
        ]
        for i, path in enumerate(paths):
            ranked = continuations(row, path[:-1], shape.ranks)[0]
            assert ranked[int(proposal.rank[row, i])] == path[-1]


@pytest.mark.parametrize("depth", range(1, 17))
def test_trees_of_every_size_grow(depth):
    for nodes in range(2, RANKS + 1) if depth == 1 else (depth + 1, 31):
        shape = TreeShape(nodes=nodes, depth=depth)
        log_rates = jnp.zeros((ROWS, depth, GAP_CLASSES, shape.ranks))

        def grow(growth, ranking, shape=shape, log_rates=log_rates):
            nodes = tree_growth.frontier(growth, jnp.array(1), shape)
            return tree_growth.add_run(growth, nodes, ranking, jnp.array(1), log_rates, shape)

        ranked = ROWS * shape.width
        ranking = Ranking(jnp.zeros((ranked, shape.ranks), int), jnp.zeros(ranked, int))
        behind = Continuations(ranking, jnp.zeros((ranked, 1), int), jnp.ones((ranked, 1)))
        empty = tree_growth.empty(ROWS, shape)
        grown_once = jax.eval_shape(grow, empty, behind)
        assert jax.tree.map(jnp.shape, grown_once) == jax.tree.map(jnp.shape, empty)
        assert (shape.runs + 1) * shape.ranks >= nodes


def test_accepted_runs_are_those_on_the_path():
    shape = TreeShape(nodes=16, depth=5)
    log_rates = rates(np.random.default_rng(1), shape)
    growth, proposal = grown(shape, log_rates, np.full(ROWS, 5, np.int32))
    run_tokens, accepted_runs = np.asarray(growth.runs.token), jax.jit(tree_growth.accepted_runs)
    for node in range(shape.nodes + 1):
        at = jnp.full(ROWS, node)
        runs, was_run = accepted_runs(growth, proposal, at)
        for row in range(ROWS):
            path = path_of(np.asarray(proposal.parents[row]), node)
            tokens = [int(proposal.proposal.tokens[row, i]) for i in path]
            bits = [run + 1 for run in range(31) if int(runs[row]) >> run & 1]
            expected = tokens if was_run[row] else tokens[:-1]
            assert run_tokens[row, bits].tolist() == expected
            assert bool(was_run[row]) == (node == 0 or int(proposal.run[row, node]) > 0)
