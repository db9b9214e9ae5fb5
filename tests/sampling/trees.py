"""Token trees for tests: random ones, and what one says by walking it in Python."""

from __future__ import annotations

import numpy as np


def random_parents(rng: np.random.Generator, rows: int, nodes: int) -> np.ndarray:
    """Parents [rows, nodes]: each any row before the node's own."""
    return rng.integers(0, np.arange(1, nodes + 1), (rows, nodes)).astype(np.int32)


def path_of(parents: np.ndarray, row: int) -> list[int]:
    """The nodes from the root to a row of one tree, its own last."""
    nodes: list[int] = []
    while row > 0:
        nodes.insert(0, row - 1)
        row = int(parents[row - 1])
    return nodes


def walk(parents: np.ndarray, tokens: np.ndarray, length: int, wanted: np.ndarray) -> list[int]:
    """The nodes that a target accepts, which has the token own[row] behind each row."""
    row, path = 0, []
    while True:
        children = [
            node for node in range(length) if parents[node] == row and tokens[node] == wanted[row]
        ]
        if not children:
            return path
        path.append(children[0])
        row = children[0] + 1
