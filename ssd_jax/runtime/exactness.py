"""Bitwise mode: a row's result depends on that row alone, so that speculation cannot change it.

Three things make it so: every product has at least three rows (`min_rows`), sums run in an order
that does not depend on how many there are (`kernels.row_sum`, attention by fixed blocks), and the
target writes the keys of its proposed tokens before it reads any. Whether a platform keeps its
side is checked by running one row through every compiled width.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import Parameters
from ssd_jax.runtime.programs import Programs
from ssd_jax.runtime.roles import IDLE

_MIN_ROWS = 3
_TOKENS = 3  # positions compared


def row_independent(execution: Execution) -> Execution:
    """The same choices with rows enough in every product."""
    return dataclasses.replace(execution, min_rows=max(execution.min_rows, _MIN_ROWS))


def costs_nothing(execution: Execution) -> bool:
    """Whether the bitwise mode runs the programs that would run anyway."""
    return row_independent(execution) == execution


def widths_agree(programs: Programs, parameters: Parameters) -> bool:
    """Whether one row gives the same bits at every width of the programs."""
    narrow, *wider = [_logits(programs, parameters, width) for width in programs.widths]
    return all(np.array_equal(narrow, other) for other in wider)


def _logits(programs: Programs, parameters: Parameters, width: int) -> np.ndarray:
    """Logits of the first tokens of a fixed text, run width + 1 at a time in slot 0."""
    text = np.arange(1, _TOKENS + width + 2, dtype=np.int32)
    pages = programs.new_pages()
    rows = []
    for begin in range(0, _TOKENS, width + 1):
        tokens = np.zeros((programs.slots, programs.verification.widths[-1]), np.int32)
        pending = np.zeros(programs.slots, np.int32)
        lengths = np.full(programs.slots, IDLE, np.int32)
        pending[0], lengths[0] = text[begin], begin
        tokens[0, :width] = text[begin + 1 : begin + 1 + width]
        logits, pages = programs["forward", width](
            list(parameters), pages, pending, tokens, lengths
        )
        rows.append(np.asarray(logits[0]))
    return np.concatenate(rows)[:_TOKENS]
