"""Verification by Pallas for GPUs, in the interpreter of JAX, where uninitialised memory is NaN."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax import compat
from ssd_jax.kernels import noise
from tests.kernels.verify_cases import (
    FIXED,
    TOKENS,
    TREE_WIDTH,
    VOCAB,
    WIDTH,
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

OLD = compat.why_no_clusters()
if OLD is not None:
    pytest.skip(f"verification by Mosaic GPU: {OLD}", allow_module_level=True)

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # noqa: E402
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import HostAllocationKey  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from ssd_jax.kernels.verify import kernel_noise, pallas_gpu, pallas_gpu_kernel  # noqa: E402

pytestmark = pytest.mark.aot

NAN = functools.partial(
    plgpu.force_gpu_interpret_mode, plgpu.InterpretGPUParams(uninitialized_memory="nan")
)
RACES = functools.partial(
    plgpu.force_gpu_interpret_mode,
    plgpu.InterpretGPUParams(detect_races=True, on_race="warn", uninitialized_memory="nan"),
)
KERNEL = Interpreted("pallas_gpu", NAN)


@settings(FIXED, max_examples=3)
@given(kinds_of_rows, st.integers(0, 10**6))
def test_outcomes_of_rows_of_all_kinds_are_those_of_the_reference(kinds, seed):
    KERNEL.assert_as_reference(case_of(kinds, seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "rule"),
    [("greedy", "ratio"), ("sampled", "ratio"), ("sampled", "coupled"), ("truncated", "coupled"),
     ("truncated", "block"), ("full", "ratio")],
)  # fmt: skip
@settings(FIXED, max_examples=5)
@given(kinds_of_rows, st.integers(0, 10**6))
def test_every_variant_and_rule_has_the_outcomes_of_the_reference(variant, rule, kinds, seed):
    KERNEL.assert_as_reference(case_of(kinds, seed, variant), variant, rule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "rule"),
    [("truncated", "coupled"), ("sampled", "coupled"), ("truncated", "ratio"), ("full", "block")],
)
@settings(FIXED, max_examples=3)
@given(kinds_of_trees, st.integers(0, 10**6))
def test_trees_have_the_outcomes_of_the_reference(variant, rule, kinds, seed):
    case, parents = as_trees(case_of(kinds, seed, variant, width=TREE_WIDTH), seed)
    KERNEL.assert_as_reference(case, variant, rule, parents=parents)


SIZES = [60, 128, 257, *(pytest.param(size, marks=pytest.mark.slow) for size in (1025, 8195))]


@pytest.mark.parametrize("vocab", SIZES)
def test_rows_of_any_size_have_the_outcomes_of_the_reference(vocab):
    """Shorter than a tile, as long as one, with a last tile of one column, and of wide tiles."""
    KERNEL.assert_as_reference(cases_of_size(vocab), tokens=vocab - 1)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [49_152, 128_256, 151_936])
def test_real_vocabularies_have_the_outcomes_of_the_reference(vocab):
    KERNEL.assert_as_reference(cases_of_size(vocab), tokens=vocab - 5)


@pytest.fixture
def races(caplog):
    """Whether blocks of a cluster race, where all rows have certain filters."""
    return lambda filters: _run_with_races_looked_for(filters) or "RACE" in caplog.text


def _run_with_races_looked_for(filters):
    case = arguments(["smooth"] * 6, VOCAB, 3, width=WIDTH, settings=(filters,))
    KERNEL.compiled.cache_clear()
    found = KERNEL.outcomes(case, "truncated", "ratio", RACES)
    KERNEL.compiled.cache_clear()
    assert found == reference(case, "truncated", "ratio")


@pytest.mark.parametrize("filters", [{"min_p": 0.02}, {"top_k": 9, "top_p": 0.7}], ids=str)
def test_blocks_of_a_cluster_do_not_race(filters, races):
    assert not races(filters)


def test_blocks_that_write_to_the_slot_before_race(races):
    with edited([Edit(pallas_gpu_kernel, "measure", "(_CUT_SLOT", "(_TOTAL_SLOT")]):
        assert races({"min_p": 0.02})


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**20))
def test_the_noise_of_the_kernel_is_the_engines(high, low, first):
    """To the rounding of log1p, which it computes by log."""
    ids = jnp.arange(first, first + 512, dtype=jnp.int32)
    key = tuple(jnp.full(1, word, jnp.uint32) for word in (high, low))
    words = tuple(jax.lax.bitcast_convert_type(word, jnp.int32)[0] for word in key)
    found = _noise_of_kernel(words, ids)
    np.testing.assert_allclose(found, _noise(key, ids[None])[0], rtol=1e-6, atol=1e-6)


_noise = jax.jit(noise.gumbel_of)
_noise_of_kernel = jax.jit(
    lambda words, ids: kernel_noise.gumbel(words, ids, pallas_gpu_kernel._log1p)
)


@pytest.mark.parametrize("u", [2.0**-65, 2.0**-40, 2.0**-24, 2.0**-23, 1e-3, 0.5, 1 - 2.0**-24])
def test_log1p_of_small_numbers_is_exact_to_rounding(u):
    found = pallas_gpu_kernel._log1p(jnp.float32(-u))
    np.testing.assert_allclose(found, np.log1p(-np.float64(np.float32(u))), rtol=3e-7)


def test_a_law_that_is_reported_is_the_one_that_is_drawn_from():
    KERNEL.assert_laws_are_equal(2)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}], ids=str)
def test_thresholds_at_the_edges_of_tiles_and_parts(filters):
    """The likeliest tokens, and equal ones at the threshold, are the last and first of tiles of 128
    columns, the last of the row's own and the ones that the last tile shares with another."""
    edges = [0, 127, 128, 171, 172, 255, 256, TOKENS - 1]
    KERNEL.assert_thresholds_at(edges, filters)


class Moved:
    """Bytes that kernels read of logits and of q, and those that they tell XLA."""

    def __init__(self):
        self.bytes, self.estimated = 0, 0
        self._get, self._kernel = gpu_callbacks._get, pallas_gpu._kernel

    def get(self, *args, **options):
        token, value = self._get(*args, **options)
        if value.shape == (1024,) and HostAllocationKey.from_array(args[3]).memory_space_id == 0:
            self.bytes += value.nbytes  # a tile of the memory that all blocks have
        return token, value

    def kernel(self, body, name, nbytes, **options):
        self.estimated += nbytes
        return self._kernel(body, name, nbytes, **options)


@pytest.mark.parametrize(
    ("variant", "reads"),
    [
        ("greedy", 1.05),
        pytest.param("sampled", 1.5, marks=pytest.mark.slow),
        pytest.param("truncated", 2.5, marks=pytest.mark.slow),
    ],
)
def test_logits_are_read_as_often_as_xla_is_told(variant, reads, monkeypatch):
    """Once; truncated rows once more, and once those that tokens are drawn from, with their q."""
    width, batch, vocab, moved = 5, 4, 8192, Moved()
    case = arguments(
        ["peaked"] * (width * batch), vocab, 0, width=width, settings=({"top_p": 0.8},)
    )
    monkeypatch.setattr(pallas_gpu, "_kernel", moved.kernel)
    monkeypatch.setattr(gpu_callbacks, "_get", moved.get)
    KERNEL.compiled.cache_clear()
    KERNEL.outcomes(case, variant, "ratio", tokens=vocab)
    KERNEL.compiled.cache_clear()
    print(f"{variant}: {moved.bytes / case[0].nbytes:.3f} reads of the logits")
    assert 1 <= moved.bytes / case[0].nbytes <= reads
    assert abs(moved.estimated / moved.bytes - 1) < 0.05


LAW_FAULTS = {
    "a column that does not exist": ("measure", "(ids < options.tokens)", "(ids >= 0)"),
    "a column that another tile has": ("Columns", "ids >= first", "ids >= 0"),
    "top-k forgotten": ("PartOfRow", "top_k > 0, with_top_k", "top_k < 0, with_top_k"),
    "top-p of what top-k has cut off": ("PartOfRow", "top_p * mass", "top_p * total"),
    "min-p forgotten": ("PartOfRow", "low_p), min_p)", "low_p), 0 * min_p)"),
    "ties at the threshold cut": ("measure", "exists & (w >= low)", "exists & (w > low)"),
    "digits too few": ("PartOfRow", "0, _BITS // _DIGIT", "0, _BITS // _DIGIT - 7"),
    "what was cut off counted": ("measure", "jnp.where(stays, w, 0.0)", "w"),
    "parts but the last forgotten": ("Cluster", "self.numbers(slot, [number])[0]",
                                     "self.numbers(slot, [number])[0][-1:]"),
    "the largest logit of a part": ("measure", "- top) / temperature", "- tops[0]) / temperature"),
}  # fmt: skip
DRAW_FAULTS = {
    "the residual forgotten": ("draw", "scale * p - q", "scale * p"),
    "the noise of another id": ("draw", "gumbel(key, ids,", "gumbel(key, ids + 1,"),
    "a cut forgotten": ("draw", "& (x >= floor)", "& (x > -jnp.inf)"),
    "the logits of another row": ("draw", "logits.at[index[number]]", "logits.at[index[0]]"),
    "the first part for all": ("draw", "tiles, part)", "tiles, 0 * part)"),
}


@pytest.mark.parametrize("name", LAW_FAULTS)
def test_planted_faults_of_laws_are_caught(name):
    with edited([Edit(pallas_gpu_kernel, *LAW_FAULTS[name])]), pytest.raises(AssertionError):
        KERNEL.assert_laws_are_equal(2)


@pytest.mark.parametrize("name", DRAW_FAULTS)
def test_planted_faults_of_draws_are_caught(name):
    cases = [case_of([kind] * 24, 2) for kind in ("smooth", "peaked")]
    expected = [reference(case, "truncated", "ratio") for case in cases]
    KERNEL.compiled.cache_clear()
    with edited([Edit(pallas_gpu_kernel, *DRAW_FAULTS[name])]):
        found = [KERNEL.outcomes(case, "truncated", "ratio") for case in cases]
    KERNEL.compiled.cache_clear()
    assert found != expected
