"""Bitwise mode: a row's result depends on that row alone, so that speculation cannot change it.

Three things ensure that: products with packed weights (`kernels/linear`) compute each row by
itself, and XLA's products have at least three rows (`min_rows`); sums run in an order that does not
depend on the number of rows (`row_sum`, attention by fixed blocks); and the target writes the keys
of its proposed tokens before it reads any. Whether a platform complies is checked by running one
row through every compiled width, forward and verification.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np

from ssd_jax import compat
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.devices.target.programs import Programs
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import Parameters
from ssd_jax.models.sharding import fully_addressable, put
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.rules import RULES
from ssd_jax.system.new_arrays import create_arrays

_MIN_ROWS = 3
_POSITIONS = 4  # compared, the last ones of a text of two blocks
_SETTINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=2),
)


def row_independent(execution: Execution) -> Execution:
    """The same choices with enough rows in every product; packed weights need no more."""
    if execution.linear == "cpu":
        return execution
    return dataclasses.replace(execution, min_rows=max(execution.min_rows, _MIN_ROWS))


def costs_nothing(execution: Execution) -> bool:
    """Whether bitwise mode runs the same programs that would run anyway."""
    return row_independent(execution) == execution


def rows_can_agree(execution: Execution) -> bool:
    """Whether a few rows that agree show that all do: no product chooses how by their number."""
    return execution.linear == "cpu" or compat.widths_can_agree(execution.compute.name)


def widths_agree(programs: Programs, parameters: Parameters) -> bool:
    """Whether one row gives the same bits at every width of the programs.

    A text of two blocks of the widest width is run; its last positions are then run again at every
    other width, over the keys and values that the widest one left before them. Then those logits
    are verified at every width.
    """
    *narrower, widest = programs.widths
    size, pages = widest + 1, programs.new_pages()

    def run(width: int, begin: int) -> np.ndarray:
        nonlocal pages
        text = np.arange(begin + 1, begin + 2 + width, dtype=np.int32)
        tokens = np.zeros((programs.slots, programs.verification.widths[-1]), np.int32)
        pending = np.zeros(programs.slots, np.int32)
        lengths = np.full(programs.slots, IDLE, np.int32)
        pending[0], tokens[0, :width], lengths[0] = text[0], text[1:], begin
        logits, pages = programs["forward", width](
            list(parameters), pages, programs.any_table(), pending, tokens, lengths
        )
        return np.asarray(fully_addressable(logits)[: width + 1])

    run(widest, 0)
    expected = run(widest, size)
    for width in narrower:
        first = max(0, size - _POSITIONS)
        for begin in range(first, size, width + 1):
            logits_there = run(width, size + begin)[: size - begin]
            if not np.array_equal(logits_there, expected[begin : begin + len(logits_there)]):
                return False
    return all(_same_outcomes(programs, expected, params) for params in _SETTINGS)


def tree_agrees(programs: Programs, parameters: Parameters) -> bool:
    """Whether rows of a tree give the same bits as rounds of one token.

    A text is run token by token, then once more as a path of a tree, whose other nodes are beside
    it; then a tree with the tokens that those logits give must be accepted along the path.
    """
    depth, nodes = programs.verification.widths[-1], programs.verification.nodes
    slots, parameters = programs.slots, list(parameters)
    pages, table = programs.new_pages(), programs.any_table()
    text = np.arange(3, depth + 5, dtype=np.int32)
    lengths, pending = np.full(slots, IDLE, np.int32), np.zeros(slots, np.int32)
    one_by_one = []
    for place, token in enumerate(text):
        lengths[0], pending[0] = place, token
        logits, pages = programs["forward", 0](
            parameters, pages, table, pending, np.zeros((slots, depth), np.int32), lengths
        )
        one_by_one.append(np.asarray(fully_addressable(logits)[:1])[0])
    parents, on_path = _path_among_others(nodes, depth)
    trees = np.zeros((slots, nodes), np.int32), np.zeros((slots, nodes), np.int32)
    trees[0][0, on_path], trees[1][0] = text[2:], parents
    lengths[0], pending[0] = 1, text[1]
    logits, pages, _ = programs["forward_tree",](parameters, pages, table, pending, *trees, lengths)
    rows = [0, *(node + 1 for node in on_path)]
    same = np.array_equal(np.asarray(fully_addressable(logits))[rows], np.stack(one_by_one[1:]))
    # Else sampled rows draw with noise that depends on the tree.
    by_position = RULES[programs.verification.rule].keyed_by_position
    return same and all(
        _tree_accepts(programs, np.stack(one_by_one[1:]), parents, on_path, params)
        for params in _SETTINGS
        if by_position or params.temperature == 0
    )


def _path_among_others(nodes: int, depth: int) -> tuple[np.ndarray, list[int]]:
    """The parents of a tree, and the nodes of a path of it that has siblings where it can."""
    parents, on_path, row = np.zeros(nodes, np.int32), [], 0
    spare = nodes - depth
    for _ in range(depth):
        node = on_path[-1] + 1 if on_path else 0
        sibling = len(on_path) < spare
        parents[node : node + 1 + sibling] = row
        on_path.append(node + sibling)
        row = on_path[-1] + 1
    return parents, on_path


def _tree_accepts(
    programs: Programs,
    logits: np.ndarray,
    parents: np.ndarray,
    on_path: list[int],
    params: SamplingParams,
) -> bool:
    """Whether a tree that has the target's own tokens on a path has them as its outcome.

    Args:
      logits: [depth + 1, V] along the path.
    """
    slots, vocab, model = programs.slots, logits.shape[1], programs.model
    depth, nodes = len(on_path), len(parents)
    rows = SamplingRows(slots, vocab, model.slot_sharding)
    rows.set(SlotOpening(0, params))
    start = np.full(slots, IDLE, np.int32)
    history, tokens = programs.new_history(), []
    blank = model.place(create_arrays(lambda: programs.verification.blank(slots)))

    def on_device(values: np.ndarray, proposed: int) -> jax.Array:
        repeated = np.broadcast_to(values, (slots, *values.shape)).reshape(-1, vocab)
        return put(repeated, programs.logits_of(proposed).sharding)

    for place in range(depth + 1):
        start[0] = place
        accept = programs.select(("accept", slots, 0), partial(rows.needed, start))
        packed, _, history = accept(
            on_device(logits[place : place + 1], 0),
            blank,
            rows.on_device(),
            start,
            history,
            np.int32(0),
        )
        tokens.append(int(np.asarray(packed)[0, 1]))
    of_tree = np.zeros((nodes + 1, vocab), np.float32)
    of_tree[[0, *(node + 1 for node in on_path)]] = logits
    drafted = [np.array(array) for array in create_arrays(programs.blank_tree)]
    drafted[0][0], drafted[0][0, on_path], drafted[1][0] = -1, tokens[:-1], nodes
    start[0] = 0
    accept = programs.select(("accept_tree",), partial(rows.needed, start))
    packed, *_ = accept(
        on_device(of_tree, nodes),
        model.place(Proposal(*drafted)),
        model.place(np.broadcast_to(parents, (slots, nodes)).copy()),
        programs.new_tree_branches(),
        programs.new_pages(),
        programs.any_table(),
        rows.on_device(),
        start,
        programs.new_history(),
    )
    return np.asarray(packed)[0].tolist() == [depth, *tokens, on_path[-1] + 1]


def _same_outcomes(programs: Programs, logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether a row with these settings has the same outcome at every width.

    Args:
      logits: [W + 1, V] of the widest verification. Their likeliest tokens are proposed.
    """
    *narrower, widest = programs.widths
    slots, vocab, model = programs.slots, logits.shape[1], programs.model
    rows = SamplingRows(slots, vocab, model.slot_sharding)
    rows.set(SlotOpening(0, params))
    start = np.full(slots, IDLE, np.int32)
    start[0] = widest
    blank = create_arrays(lambda: programs.verification.blank(slots))
    tokens, lengths, support, q = map(np.array, blank)
    proposed = logits[:-1].argmax(axis=1)
    tokens[0, :widest] = support[0, :widest, 0] = proposed
    support[0, :, 1:], q[0, :, 0] = -1, 1

    def run(width: int, length: int) -> list[np.ndarray]:
        lengths[0] = length
        repeated = np.broadcast_to(logits[: width + 1], (slots, width + 1, vocab))
        accept = programs.select(("accept", slots, width), partial(rows.needed, start))
        packed, *_ = accept(
            put(repeated.reshape(-1, vocab), programs.logits_of(width).sharding),
            model.place(Proposal(tokens, lengths.copy(), support, q)),
            rows.on_device(),
            start,
            programs.new_history(),
            np.int32(0),
        )
        outcome = np.asarray(packed)[0]
        return [outcome[:1], outcome[1 : length + 2]]

    return all(
        np.array_equal(one, other)
        for width in narrower
        for one, other in zip(run(width, width), run(widest, width), strict=True)
    )
