"""Products with packed weights: near the reference, and a row's bits its own."""

import dataclasses
import functools
import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.linear import api, cpu, packing, reference
from ssd_jax.kernels.linear.kinds import GGML_KINDS, KINDS, STORED_KINDS
from ssd_jax.kernels.linear.quantized import quantize
from ssd_jax.kernels.piece import Piece
from ssd_jax.kernels.rows import Norm, rms_norm
from ssd_jax.system.cores import usable_cores
from tests.kernels.stored_rows import random_blocks
from tests.selection import cases

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17, 31, 32, 33, 64, 67, 100, 300)
SHAPES = ((1, 256), (31, 512), (33, 768), (100, 256), (576, 1536))


pack_bfloat16 = jax.jit(packing.pack_bfloat16)
pack_int8 = jax.jit(lambda dense: packing.pack_int8(*quantize(dense)))


@functools.cache
def weight(kind, outputs, inputs, seed=0):
    rng = np.random.default_rng(seed)
    if kind in STORED_KINDS:
        padded = KINDS[kind].padded_inputs(inputs)
        blocks = random_blocks(kind, outputs, padded, seed)
        if kind == "F8_E4M3":  # the last block has zeros behind the inputs
            blocks[:, blocks.shape[1] - (padded - inputs) :] = 0
        panels = packing.pack_blocks(KINDS[kind], blocks)
    else:
        dense = jnp.asarray(rng.normal(size=(outputs, inputs)), jnp.float32)
        panels = (pack_bfloat16 if kind == "bfloat16" else pack_int8)(dense)
    return api.Packed(jnp.asarray(panels), kind, outputs, inputs)


def states(rows, inputs, seed=1):
    x = np.random.default_rng(seed).normal(size=(rows, inputs))
    x[:, 3] *= 40  # a channel that is larger than the rest, as in real models
    return jnp.asarray(x, jnp.float32)


def product(x, packed):
    return np.asarray(_product(x, packed.panels, packed.kind, packed.outputs, packed.inputs))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _product(x, panels, kind, outputs, inputs):
    return api.products(x, [api.Packed(panels, kind, outputs, inputs)])[0]


def expected(x, packed):
    panels = np.asarray(packed.panels)
    return reference.product(np.asarray(x), KINDS[packed.kind], panels, packed.outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_the_references(kind, shape):
    x, packed = states(9, shape[1]), weight(kind, *shape)
    want = expected(x, packed)
    np.testing.assert_allclose(product(x, packed), want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "w8a8", "F8_E4M3"])
@pytest.mark.parametrize("inputs", [1, 2, 3, 31, 33, 65, 127])
def test_products_take_any_number_of_inputs(kind, inputs):
    x, packed = states(3, max(inputs, 4))[:, :inputs], weight(kind, 37, inputs)
    want = expected(x, packed)
    np.testing.assert_allclose(product(x, packed), want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind", cases(KINDS, "bfloat16", "int8", "F8_E4M3", "Q4_1", "Q6_K"))
@pytest.mark.parametrize("inputs", cases([768, 1056], 1056))
def test_a_row_has_the_same_bits_beside_any_rows(kind, inputs):
    if kind in GGML_KINDS:
        inputs -= inputs % KINDS[kind].block
    x, packed = states(max(ROWS), inputs), weight(kind, 100, inputs)
    all_rows = product(x, packed)
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[:rows], packed), all_rows[:rows])
        np.testing.assert_array_equal(product(x[-rows:], packed), all_rows[-rows:])


@pytest.mark.parametrize("rows", [5, 70])
def test_weights_of_one_call_are_those_of_calls_of_their_own(rows):
    x = states(rows, 512)
    weights = [weight(kind, 40 + i, 512) for i, kind in enumerate(KINDS)]
    together = jax.jit(lambda x: api.products(x, weights))(x)
    for y, packed in zip(together, weights, strict=True):
        np.testing.assert_array_equal(y, product(x, packed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [4, 33])
def test_what_is_not_finite_shows_and_stays_in_its_row(kind, value, rows):
    x, packed = states(rows, 256), weight(kind, 64, 256)
    bad = product(x.at[2, 100].set(value), packed)
    good = product(x, packed)
    others = np.arange(rows) != 2
    np.testing.assert_array_equal(bad[others], good[others])
    assert not np.isfinite(bad[2]).any()
    assert kind in ("bfloat16", "F8_E4M3") or np.isnan(bad[2]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-25, 1e20])
def test_tiny_and_huge_rows(kind, size):
    x, packed = jnp.full((2, 256), size, jnp.float32), weight(kind, 32, 256)
    y, want = product(x, packed), expected(x, packed)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=2e-6 * np.abs(want).max() + 1e-35)


def test_activations_between_two_of_bfloat16_go_to_the_even_one():
    x, packed = 1 + jnp.array([[1.0], [3.0]]) * jnp.full(256, 2.0**-8), weight("bfloat16", 32, 256)
    want = expected(x, packed)
    np.testing.assert_allclose(product(x, packed), want, atol=2e-6 * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_weight_can_be_looked_up(kind):
    packed = weight(kind, 70, 256)
    dense = reference.dense(KINDS[kind], np.asarray(packed.panels), 70, 256)
    rows = np.asarray([69, 0, 31, 32, 69, 5], np.int32)
    np.testing.assert_array_equal(jax.jit(lambda at: api.take(packed, at))(rows), dense[rows])
    outside = jax.jit(lambda at: api.take(packed, at))(np.asarray([-1, 70, 96], np.int32))
    assert np.isnan(outside).all()


def test_every_float_of_8_bits_is_looked_up_and_multiplied_as_it_is():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    blocks = np.concatenate([np.full((2, 1), 3, np.float32).view(np.uint8), codes], axis=1)
    panels = packing.pack_blocks(KINDS["F8_E4M3"], blocks)
    packed = api.Packed(jnp.asarray(panels), "F8_E4M3", 2, 128)
    want = 3 * codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = jax.jit(lambda at: api.take(packed, at))(np.arange(2, dtype=np.int32))
    np.testing.assert_array_equal(found, want)
    one = np.eye(128, dtype=np.float32)[:127]  # not the last input, which is no number
    products = np.concatenate([product(one[first : first + 32], packed) for first in (0, 32, 64)])
    assert np.isnan(products).all()  # 0 times what is no number
    blocks[:, -1] = 0
    panels = packing.pack_blocks(KINDS["F8_E4M3"], blocks)
    packed = api.Packed(jnp.asarray(panels), "F8_E4M3", 2, 128)
    np.testing.assert_array_equal(product(one, packed), want[:, :127].T)


def test_weights_of_another_kind_or_shape_are_refused():
    packed = weight("Q4_1", 64, 256)
    for wrong in (
        api.Packed(packed.panels, "Q4_0", 64, 256),
        api.Packed(packed.panels, "Q9", 64, 256),
        api.Packed(packed.panels, "Q4_1", 65, 256),
        api.Packed(packed.panels[:, :-64], "Q4_1", 64, 256),
    ):
        with pytest.raises(Exception, match="not packed as"):
            product(states(1, 256), wrong)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "w8a8", "F8_E4M3", "Q4_1"])
def test_rows_are_normed_before(kind):
    size = jnp.array([[1.0], [1e-3], [1.0], [0.0], [1e-3]])  # some small beside eps
    x, packed = states(5, 288) * size, weight(kind, 40, 288)
    norm = Norm(jnp.linspace(0.5, 2, 288, dtype=jnp.float32), 1e-5)
    run = jax.jit(lambda x: api.products(x, [packed], norm)[0])
    want = expected(rms_norm(x, norm), packed)
    np.testing.assert_allclose(run(x), want, atol=5e-3 * np.abs(want).max())
    np.testing.assert_array_equal(run(x[2:3]), run(x)[2:3])


@pytest.mark.parametrize("weights", [jnp.ones(255), Piece(jnp.zeros(1087, jnp.uint8), 64)])
def test_a_norm_of_another_width_is_refused(weights):
    packed, norm = weight("int8", 8, 256), Norm(weights, 1e-5)
    with pytest.raises(Exception, match="one weight an input"):
        jax.jit(lambda x: cpu.products(x, [packed], norm))(states(1, 256))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_an_array_are_used_as_arrays_of_their_own(kind):
    x, weights = states(3, 256), [weight(kind, outputs, 256, outputs) for outputs in (40, 64)]
    norm = Norm(jnp.linspace(0.5, 2, 256, dtype=jnp.float32), 1e-5)
    parts = [weights[0].panels, np.asarray(norm.weight).view(np.uint8), weights[1].panels]
    joined = jnp.concatenate([np.reshape(part, -1) for part in parts])
    first, second, _ = np.cumsum([part.size for part in parts]).tolist()
    pieces = [
        dataclasses.replace(weight, panels=Piece(joined, at))
        for weight, at in zip(weights, (0, second), strict=True)
    ]
    of_pieces = jax.jit(lambda x: cpu.products(x, pieces, Norm(Piece(joined, first), 1e-5)))(x)
    for got, want in zip(of_pieces, cpu.products(x, weights, norm), strict=True):
        np.testing.assert_array_equal(got, want)
    for at in (second + 1, -1):
        beyond = dataclasses.replace(weights[1], panels=Piece(joined, at))
        with pytest.raises(Exception, match="not packed as"):
            cpu.products(x, [beyond])


def bits():
    """A digest of products of every kind, which several threads share if there are cores."""
    found = hashlib.sha256()
    for kind in KINDS:
        packed = weight(kind, 576, 1536)
        for rows in (1, 40):
            found.update(product(states(rows, 1536), packed).tobytes())
    return found.hexdigest()


@pytest.mark.more
@pytest.mark.skipif(len(usable_cores()) < 2, reason="two processor cores")
def test_products_have_the_same_bits_on_one_core_and_on_all():
    one = min(usable_cores())
    alone = f"import os; os.sched_setaffinity(0, {{{one}}})"  # before JAX counts them
    code = f"{alone}; from tests.kernels.test_linear import bits; print(bits())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == bits()


def test_a_product_of_no_rows_has_none():
    assert product(states(1, 256)[:0], weight("int8", 8, 256)).shape == (0, 8)


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "w8a8", "Q4_1"])
def test_weights_that_stay_in_a_cache_have_the_same_products(kind, rows):
    passing, x = weight(kind, 70, 256), states(rows, 256)
    [stays] = api.products(x, [dataclasses.replace(passing, cache_resident=True)])
    np.testing.assert_array_equal(stays, api.products(x, [passing])[0])
