"""The experiments on the law have the power to catch the faults that they are there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling.edits import Edit, edited
from tests.sampling.evidence import ALPHA
from tests.sampling.mutants import EXPERIMENTS, MUTANTS, Mutant, experiment
from tests.sampling.simulation import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
SEEDS = 100

NAMED = (
    "wrong q",
    "q before truncation",
    "dropped residual",
    "u <= p/q with u = 0",
    "a draw reused",
    "start dropped from the key",
    "L chosen by looking at a dropped token",
    "penalties blind to in-flight tokens",
    "bad words",
    "a point-mass row verified with a stale q",
    "Saguaro set",
    "block verification",
    "logits at a sentinel temperature",
)


def row(mutant: Mutant, caught: int) -> str:
    """The mutant's line of the table in the documentation."""
    return f"| {mutant.name} | {mutant.experiment} | {ROWS:,} | {ALPHA:.0e} | {caught} |"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_code_passes_every_experiment(name):
    with experiment(name) as p_value:
        assert p_value(0) > ALPHA


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_is_caught(mutant):
    with experiment(mutant.experiment, mutant) as p_value:
        assert p_value(0) <= ALPHA


def test_every_kind_of_fault_has_a_mutant_and_a_line_in_the_documentation():
    for kind in NAMED:
        assert any(mutant.name.startswith(kind) for mutant in MUTANTS), kind
    page = PAGE.read_text()
    for mutant in MUTANTS:
        assert any(row(mutant, caught) in page for caught in (99, 100)), mutant.name


def test_an_edit_that_no_longer_fits_the_code_is_refused():
    first = MUTANTS[0].edits[0]
    with (
        pytest.raises(ValueError, match="exactly once"),
        edited([Edit(first.module, first.function, "no such text", "")]),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_code_passes_every_experiment_at_every_seed(name):
    with experiment(name) as p_value:
        assert min(p_value(seed) for seed in range(SEEDS)) > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_documented_catch_rate_is_what_comes_out(mutant):
    with experiment(mutant.experiment, mutant) as p_value:
        caught = sum(p_value(seed) <= ALPHA for seed in range(SEEDS))
    print(row(mutant, caught))
    assert caught >= 0.99 * SEEDS
    assert row(mutant, caught) in PAGE.read_text()
