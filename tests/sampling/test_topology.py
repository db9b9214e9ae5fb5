"""Paths, depths and rows of token trees, against a walk from parent to parent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.sampling import topology
from tests.sampling.trees import path_of, random_parents


@pytest.mark.parametrize("nodes", [1, 2, 7, 31])
def test_paths_are_those_from_parent_to_parent(nodes):
    parents = random_parents(np.random.default_rng(nodes), 20, nodes)
    parents[0] = np.arange(nodes)  # the longest path there is
    paths = np.asarray(jax.jit(topology.paths)(parents))
    for row_parents, row_paths in zip(parents, paths, strict=True):
        for row, path in enumerate(row_paths.tolist()):
            assert path == sum(1 << node for node in path_of(row_parents, row))


def test_a_chain_has_the_paths_of_its_parents():
    parents = np.arange(7, dtype=np.int32)[None]
    assert topology.chain_paths(7).tolist() == topology.paths(jnp.asarray(parents))[0].tolist()


def test_depths_and_rows_follow_from_a_path():
    parents = random_parents(np.random.default_rng(0), 30, 12)
    paths = topology.paths(jnp.asarray(parents))
    for last in range(13):
        rows = np.asarray(topology.rows_of(paths[:, last], 12, 12))
        depths = np.asarray(topology.depth_of(paths[:, last]))
        for row_parents, row, depth in zip(parents, rows.tolist(), depths.tolist(), strict=True):
            path = path_of(row_parents, last)
            assert depth == len(path)
            assert row == [0, *(node + 1 for node in path), *[0] * (12 - len(path))]
