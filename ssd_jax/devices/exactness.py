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

import numpy as np

from ssd_jax.devices.sampling_rows import SamplingRows
from ssd_jax.devices.target_programs import Programs
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import Parameters
from ssd_jax.models.sharding import fully_addressable, put
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system.stored_jit import create_arrays

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
