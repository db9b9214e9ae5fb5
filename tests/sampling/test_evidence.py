"""What the statistical tests can see."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.llm import law
from tests.sampling import simulation, test_drafting, test_statistics
from tests.sampling import test_verification as verification
from tests.sampling.evidence import ALPHA, least_shift, p_value

DOCS = Path(__file__).parents[2] / "docs/exactness.md"
TESTS = {
    "`test_statistics.py`": (
        simulation.ROWS // len(test_statistics.SETTINGS),
        simulation.VOCAB**test_statistics.MIXED.count,
    ),
    "`test_mutants.py`": (simulation.ROWS, simulation.VOCAB**simulation.Scenario.count),
    "`test_against_enumeration.py`": (simulation.ROWS, 3 + 9 + 27),
    "`test_verification.py`": (verification.ROWS, verification.VOCAB**2),
    "`test_drafting.py`": (test_drafting.ROWS, test_drafting.VOCAB),
    "`test_probs.py`": (20_000, 5),
    "`test_backup.py`": (12_000, 36),
    "`test_engine_law.py`": (law.EACH, len(law.LETTERS) ** law.COUNT + 1),
    "`test_engine_law.py`, `test_process_law.py`, `test_reduced_draft.py` (slow)": (
        law.MANY,
        len(law.LETTERS) ** law.COUNT + 1,
    ),
}


@pytest.mark.parametrize(("rows", "cells"), TESTS.values(), ids=TESTS)
@pytest.mark.parametrize("probability", [0.5, 0.05])
def test_the_least_shift_is_just_seen(rows, cells, probability):
    shift = least_shift(rows, cells, probability)
    law = np.full(cells, (1 - probability) / (cells - 1))
    law[0] = probability

    def shifted(by):
        share = law * (1 - probability - by) / (1 - probability)
        share[0] = probability + by
        return p_value(share * rows, law)

    assert shifted(1.01 * shift) <= ALPHA < shifted(0.99 * shift)


def test_the_table_of_shifts_says_what_they_are():
    rows = re.findall(
        r"^\| (`test_.*?) \| ([\d,]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", DOCS.read_text(), re.M
    )
    found = {name: tuple(float(value.replace(",", "")) for value in rest) for name, *rest in rows}
    assert {name: values[:2] for name, values in found.items()} == TESTS
    for name, (n, cells) in TESTS.items():
        shifts = [least_shift(n, cells, p) for p in (0.5, 0.05)]
        assert found[name][2:] == pytest.approx(shifts, abs=5.1e-4)
