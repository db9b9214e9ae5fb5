"""Products with experts' packed weights: bit for bit those of a call for each expert's rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssd_jax.kernels import handlers
from ssd_jax.kernels.experts import cpu
from ssd_jax.kernels.linear import api
from ssd_jax.kernels.linear.kinds import KINDS
from ssd_jax.kernels.piece import Piece
from tests.kernels import test_linear
from tests.kernels.test_linear import states
from tests.selection import cases

pytestmark = pytest.mark.skipif(handlers.why_missing() is not None, reason="no C++ compiler")

EXPERTS, INPUTS, ROWS = 5, 256, 300
OUTPUTS = 40  # the second panel of an expert is not full
SIZES = st.lists(st.integers(0, 70), min_size=EXPERTS, max_size=EXPERTS).filter(
    lambda sizes: sum(sizes) <= ROWS
)


@functools.cache
def weights(kind, outputs=OUTPUTS):
    """Each expert's weight, and the one of all experts."""
    weights = [test_linear.weight(kind, outputs, INPUTS, seed) for seed in range(EXPERTS)]
    together = jnp.concatenate([weight.panels for weight in weights])
    return weights, api.Packed(together, kind, outputs, INPUTS)


@functools.cache
def of_all_experts(kind):
    """Products of all rows with each expert's weight, [experts, rows, outputs]."""
    run = jax.jit(lambda x: api.products(x, weights(kind)[0]))
    return np.stack(run(states(ROWS, INPUTS)))


@functools.cache
def program(kind):
    packed = weights(kind)[1]
    return jax.jit(lambda x, sizes: cpu.products(x, sizes, [packed])[0])


def run(kind, x, sizes):
    return np.asarray(program(kind)(x, np.asarray(sizes, np.int32)))


def check(kind, sizes):
    y = run(kind, states(ROWS, INPUTS), sizes)
    expert = np.repeat(np.arange(EXPERTS), sizes)
    np.testing.assert_array_equal(
        y[: len(expert)], of_all_experts(kind)[expert, np.arange(len(expert))]
    )
    np.testing.assert_array_equal(y[len(expert) :], 0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["bfloat16", "int8", "w8a8", "Q4_1", "Q6_K"]), SIZES)
@example("bfloat16", [300, 0, 0, 0, 0])
@example("int8", [0, 0, 0, 0, 300])
@example("Q4_1", [1, 257, 0, 1, 41])
@example("Q4_1", [0, 0, 0, 0, 0])
def test_a_row_has_the_bits_of_its_own_experts_product(kind, sizes):
    check(kind, sizes)


@pytest.mark.parametrize("kind", cases(KINDS, "Q4_0", "Q8_0", "Q4_K"))
@pytest.mark.parametrize("sizes", [(1, 0, 1, 1, 0), (3, 9, 0, 20, 33), (7, 256, 5, 30, 2)])
def test_every_kind_has_products_of_experts(kind, sizes):
    check(kind, sizes)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "Q4_1"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_row(kind, value):
    x = states(ROWS, INPUTS)
    sizes = (4, 0, 30, 1, 7)
    good, bad = run(kind, x, sizes), run(kind, x.at[10, 7].set(value), sizes)
    others = np.arange(ROWS) != 10
    np.testing.assert_array_equal(bad[others], good[others])
    assert not np.isfinite(bad[10]).any()


def test_weights_of_one_call_are_those_of_calls_of_their_own():
    x, sizes = states(20, INPUTS), np.asarray([4, 0, 9, 1, 2], np.int32)
    together = [weights(kind, 32 + i)[1] for i, kind in enumerate(KINDS)]
    ys = jax.jit(lambda x: cpu.products(x, sizes, together))(x)
    for y, weight in zip(ys, together, strict=True):
        [alone] = cpu.products(x, sizes, [weight])
        np.testing.assert_array_equal(y, alone)


@pytest.mark.parametrize("kind", ["bfloat16", "Q4_1"])
def test_pieces_of_an_array_are_used_as_arrays_of_their_own(kind):
    x, sizes = states(9, INPUTS), np.asarray([4, 0, 3, 1, 1], np.int32)
    packed = weights(kind)[1]
    joined = jnp.concatenate([jnp.zeros(64, jnp.uint8), packed.panels.reshape(-1)])
    piece = dataclasses.replace(packed, panels=Piece(joined, 64), cache_resident=True)
    [got], [want] = (cpu.products(x, sizes, [panel]) for panel in (piece, packed))
    np.testing.assert_array_equal(got, want)
    with pytest.raises(Exception, match="not packed as"):
        cpu.products(x, sizes, [dataclasses.replace(packed, panels=Piece(joined, 65))])


@pytest.mark.parametrize("sizes", [(5, 0, 0, 0, 5), (4, -1, 0, 0, 0)])
def test_other_rows_than_there_are_are_refused(sizes):
    with pytest.raises(Exception, match="experts have other rows than there are"):
        cpu.products(states(9, INPUTS), np.asarray(sizes, np.int32), [weights("int8")[1]])


def test_weights_of_another_number_of_experts_are_refused():
    with pytest.raises(Exception, match="not packed as"):
        cpu.products(states(9, INPUTS), np.zeros(4, np.int32), [weights("int8")[1]])


def test_no_rows_have_no_products():
    [y] = cpu.products(states(1, INPUTS)[:0], np.zeros(EXPERTS, np.int32), [weights("int8")[1]])
    assert y.shape == (0, OUTPUTS)
