"""Verification by Pallas for TPUs, in the interpreter of JAX, where uninitialised memory is NaN."""

from __future__ import annotations

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ssd_jax.kernels import noise
from ssd_jax.kernels.verify import pallas_tpu_kernel
from ssd_jax.sampling import verification
from ssd_jax.sampling.variants import VARIANTS
from tests.kernels.verify_cases import (
    FIXED,
    KINDS,
    TOKENS,
    TREE_WIDTH,
    Interpreted,
    arguments,
    as_trees,
    case_of,
    cases_of_size,
    kinds_of_rows,
    kinds_of_trees,
    reference,
)
from tests.sampling.edits import Edit, edited

OF_TREES = (("greedy", "ratio"), ("sampled", "coupled"), ("truncated", "ratio"), ("full", "block"))
NAN = functools.partial(
    pltpu.force_tpu_interpret_mode, pltpu.InterpretParams(uninitialized_memory="nan")
)
RACES = functools.partial(
    pltpu.force_tpu_interpret_mode,
    pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan"),
)
KERNEL = Interpreted("pallas_tpu", NAN)
SOME, MANY = settings(FIXED, max_examples=6), settings(FIXED, max_examples=30)


@SOME
@given(kinds_of_rows, st.integers(0, 10**6))
def test_outcomes_of_rows_of_all_kinds_are_those_of_the_reference(kinds, seed):
    KERNEL.assert_as_reference(case_of(kinds, seed))


@pytest.mark.more
@pytest.mark.parametrize(
    ("variant", "rule"),
    [("greedy", "ratio"), ("sampled", "ratio"), ("sampled", "coupled"), ("truncated", "coupled"),
     ("truncated", "block"), ("full", "ratio")],
)  # fmt: skip
@MANY
@given(kinds_of_rows, st.integers(0, 10**6))
def test_every_variant_and_rule_has_the_outcomes_of_the_reference(variant, rule, kinds, seed):
    KERNEL.assert_as_reference(case_of(kinds, seed, variant), variant, rule)


@pytest.mark.parametrize(
    ("variant", "rule"),
    [
        ("truncated", "coupled"),
        *(pytest.param(*of, marks=pytest.mark.more) for of in OF_TREES),
    ],
)
@SOME
@given(kinds_of_trees, st.integers(0, 10**6))
def test_trees_have_the_outcomes_of_the_reference(variant, rule, kinds, seed):
    case, parents = as_trees(case_of(kinds, seed, variant, width=TREE_WIDTH), seed)
    KERNEL.assert_as_reference(case, variant, rule, parents=parents)


MORE_SIZES = [*(pytest.param(size, marks=pytest.mark.more) for size in (257, 1025, 8195))]
REAL_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (49_152, 128_256, 151_936)]


@pytest.mark.parametrize("vocab", [60, 128, *MORE_SIZES, *REAL_SIZES])
def test_rows_of_any_size_have_the_outcomes_of_the_reference(vocab):
    """Shorter than the lanes, as long, with a last column of its own, and of real vocabularies."""
    KERNEL.assert_as_reference(cases_of_size(vocab), tokens=vocab - 1)


def test_copies_do_not_race():
    case = case_of([*KINDS, *KINDS[:3]], 3)
    KERNEL.compiled.cache_clear()
    found = KERNEL.outcomes(case, "truncated", "ratio", RACES)
    KERNEL.compiled.cache_clear()
    assert found == reference(case, "truncated", "ratio")
    assert not interpreter.races.races_found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**20))
def test_the_noise_of_the_kernel_is_the_engines_to_the_bit(high, low, first):
    key = tuple(jnp.full(8, word, jnp.uint32) for word in (high, low))
    ids = jnp.arange(first, first + 512, dtype=jnp.int32)[None]
    words = tuple(jax.lax.bitcast_convert_type(word, jnp.int32)[:, None] for word in key)
    found = _noise_of_kernel(words, jnp.broadcast_to(ids, (8, 512)))
    np.testing.assert_array_equal(found, _noise(key, ids))


_noise_of_kernel, _noise = jax.jit(pallas_tpu_kernel.gumbel), jax.jit(noise.gumbel_of)


def test_a_law_that_is_reported_is_the_one_that_is_drawn_from():
    KERNEL.assert_laws_are_equal(4)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_thresholds_at_the_edges_of_lanes(filters):
    """The likeliest tokens, and equal ones at the threshold, are the last and first of 128 columns,
    and the last that exists."""
    edges = [0, 127, 128, 255, 256, TOKENS - 1]
    KERNEL.assert_thresholds_at(edges, filters)


class Moved:
    """Bytes of blocks and of copies by a kernel that an interpreted run moves, and of estimates."""

    def __init__(self):
        self.bytes, self.estimated = 0, 0
        self._get, self._copy = interpreter.get, pltpu.make_async_copy
        self._call = pl.pallas_call

    def counting_get(self):
        def get(*args, input_name=None, **options):
            found = self._get(*args, input_name=input_name, **options)
            if input_name is not None:
                self.bytes += found[-1].nbytes
            return found

        get.__wrapped__ = self._get.__wrapped__  # which copies call
        return get

    def make_async_copy(self, source, target, semaphore):
        copy, size = self._copy(source, target, semaphore), source.dtype.itemsize * source.size

        def start():
            jax.debug.callback(lambda: setattr(self, "bytes", self.bytes + size))
            copy.start()

        return mock.Mock(start=start, wait=copy.wait)

    def pallas_call(self, *args, cost_estimate, **options):
        self.estimated += cost_estimate.bytes_accessed
        return self._call(*args, cost_estimate=cost_estimate, **options)


@pytest.mark.parametrize(
    ("variant", "reads"), [("greedy", 1.05), ("sampled", 1.3), ("truncated", 1.3)]
)
def test_logits_are_read_once_and_the_rows_that_are_drawn_from_once_more(variant, reads):
    """As many bytes as the kernels tell the compiler."""
    width, batch, vocab, moved = 5, 16, 16_384, Moved()
    case = arguments(["peaked"] * (width * batch), vocab, 0, width=width, settings=({},))
    law = {"tokens": vocab, "parts": VARIANTS[variant], "backend": "pallas_tpu"}
    with (
        mock.patch.object(pl, "pallas_call", moved.pallas_call),
        mock.patch.object(interpreter, "get", moved.counting_get()),
        mock.patch.object(pltpu, "make_async_copy", moved.make_async_copy),
        NAN(),
    ):
        jax.block_until_ready(jax.jit(functools.partial(verification.verify, **law))(*case))
    jax.effects_barrier()
    print(f"{variant}: {moved.bytes / case[0].nbytes:.3f} reads of the logits")
    assert 1 <= moved.bytes / case[0].nbytes <= reads
    assert abs(moved.estimated / moved.bytes - 1) < 0.05


LAW_FAULTS = {
    "a column that does not exist": ("measure", "columns < options.tokens", "columns >= 0"),
    "top-k forgotten": ("_low", "top_k > 0, lambda", "top_k < 0, lambda"),
    "top-p of what top-k has cut off": ("_low", "search(top_p * mass", "search(top_p * total"),
    "min-p forgotten": ("_low", "_lane(settings, RowInput().min_p)", "0.0"),
    "ties at the threshold cut": ("measure", "stays = weights >= low", "stays = weights > low"),
    "digits too few": ("_low", "0, _BITS // _DIGIT", "0, _BITS // _DIGIT - 7"),
    "what was cut off counted": ("measure", "jnp.where(stays, weights, 0.0)", "weights"),
}
DRAW_FAULTS = {
    "a row without numbers hides others": ("draw", "_any(p > 0)", "jnp.max(p) > 0"),
    "q of another row": ("_spread", "line == place", "line == 7 - place"),
    "the residual forgotten": ("draw", "- q_rows[0][:, pl.ds(first, width)]", "- 0.0"),
    "the noise of another id": ("draw", "gumbel(key, columns)", "gumbel(key, columns + 1)"),
    "a cut forgotten": ("draw", "jnp.where(x >= floor, ", "jnp.where(x > -jnp.inf, "),
    "the logits of another row": ("draw", "index[first_row + place]", "index[first_row]"),
}


@pytest.mark.parametrize("name", LAW_FAULTS)
def test_planted_faults_of_laws_are_caught(name):
    with edited([Edit(pallas_tpu_kernel, *LAW_FAULTS[name])]), pytest.raises(AssertionError):
        KERNEL.assert_laws_are_equal(4)


@pytest.mark.parametrize("name", DRAW_FAULTS)
def test_planted_faults_of_draws_are_caught(name):
    cases = [case_of(["infinite", *["smooth"] * 11], seed) for seed in range(8)]
    expected = [reference(case, "truncated", "ratio") for case in cases]
    KERNEL.compiled.cache_clear()
    with edited([Edit(pallas_tpu_kernel, *DRAW_FAULTS[name])]):
        found = [KERNEL.outcomes(case, "truncated", "ratio") for case in cases]
    KERNEL.compiled.cache_clear()
    assert found != expected
