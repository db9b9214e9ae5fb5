"""Every backend of `verify` gives the outcomes of the one that is written for reading."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.verify import api, xla
from ssd_jax.kernels.verify.reference import sampled_probs_reference
from ssd_jax.sampling.variants import ON_DEVICE, VARIANTS
from tests.kernels.verify_cases import KINDS, arguments, as_trees, outcomes, verify
from tests.sampling.edits import Edit, edited
from tests.sampling.rows import rows

WIDTH, ROWS = 3, 4
TREE_WIDTH = 6
MORE = pytest.mark.more
PROGRAMS = {
    "decided": (ON_DEVICE, "xla"),
    "decided with thresholds of a processor": (ON_DEVICE, "cpu"),
    "at once": (VARIANTS["full"], "xla"),
}
needs_compiler = pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
every_program = pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=needs_compiler if "cpu" in program else ())
        for name, program in PROGRAMS.items()
    ],
)


def assert_equal_outcomes(case, program, tokens, rule, parents=None):
    parts, backend = PROGRAMS[program]
    law = {"tokens": tokens, "rule": rule, "parts": parts, "parents": parents}
    expected = verify(*case, backend="reference", **law)
    found = verify(*case, backend=backend, **law)
    assert outcomes(found) == outcomes(expected)


@every_program
@pytest.mark.parametrize("rule", ["ratio", pytest.param("block", marks=MORE), "coupled"])
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=WIDTH * ROWS, max_size=WIDTH * ROWS),
    st.integers(0, 10**6),
)
def test_outcomes_are_those_of_the_reference(program, rule, kinds, seed):
    assert_equal_outcomes(arguments(kinds, 131, seed, width=WIDTH), program, 127, rule)


@every_program
@pytest.mark.parametrize(
    "rule", [*(pytest.param(r, marks=MORE) for r in ("ratio", "block")), "coupled"]
)
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from(KINDS), min_size=TREE_WIDTH * ROWS, max_size=TREE_WIDTH * ROWS),
    st.integers(0, 10**6),
)
def test_outcomes_of_trees_are_those_of_the_reference(program, rule, kinds, seed):
    case, parents = as_trees(arguments(kinds, 131, seed, width=TREE_WIDTH), seed)
    assert_equal_outcomes(case, program, 127, rule, parents)


@pytest.mark.more
@every_program
@pytest.mark.parametrize(
    "vocab", [4097, 49_152, pytest.param(128_256, marks=pytest.mark.slow), 151_936]
)
def test_real_vocabularies_give_the_outcomes_of_the_reference(vocab, program):
    kinds = [kind for kind in KINDS for _ in range(2)]
    case = arguments(kinds, vocab, vocab, width=2, support=64)
    assert_equal_outcomes(case, program, vocab - 5, "ratio")


UNSOUND = ["smooth", "peaked", "NaN"] * 4
FAULTS = {
    "a row without numbers accepted": Edit(api, "verify", "is_checked & ~sound", "is_checked & 0"),
    "a bonus from a row without numbers": Edit(
        api, "verify", "any_unsound, NO_TOKEN, outcome.bonus", "any_unsound, outcome.bonus, 0"
    ),
    "the row behind an accepted token not looked at": Edit(
        api, "verify", "positions.path & ~outcome.path[positions.row] == 0", "positions.path == 0"
    ),
    "a residual that ignores where it applies": Edit(
        xla, "_weights", "residual.applies[:, None]", "residual.applies[:, None] | True"
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(name):
    cases = [arguments(UNSOUND, 131, seed, width=WIDTH) for seed in range(12)]
    common = {"tokens": 127, "rule": "ratio", "parts": VARIANTS["full"]}
    expected = [outcomes(verify(*case, backend="reference", **common)) for case in cases]
    assert any(bonus < 0 for found in expected for _, bonus, _ in found)
    with edited([FAULTS[name]]):
        jax.clear_caches()
        found = [outcomes(verify(*case, **common)) for case in cases]
    jax.clear_caches()
    assert found != expected


def test_the_law_of_the_reference_keeps_ties():
    logits = np.log(np.array([[0.4, 0.2, 0.2, 0.1, 0.1]] * 3, np.float32))
    law = sampled_probs_reference(logits, rows({"top_k": 2}, {"top_p": 0.55}, {"min_p": 0.25}))
    allowed = (np.asarray(law) > 0).tolist()
    assert allowed == [[True] * 3 + [False] * 2, [True] * 3 + [False] * 2, [True] * 5]
