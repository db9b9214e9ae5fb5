from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ssd_jax.kernels.linear.kinds import (
    BFLOAT16,
    FLOAT8,
    GGML_KINDS,
    INT8,
    KINDS,
    LANES,
    STORED_KINDS,
)
from ssd_jax.kernels.linear.packing import pack_bfloat16, pack_blocks, pack_int8
from ssd_jax.kernels.linear.quantized import digits, integer_product, quantize
from ssd_jax.kernels.linear.reference import dense, product
from tests.kernels.stored_rows import dequantized, random_blocks

OUTPUTS = (1, 31, 32, 33, 100)


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", [256, 768])
@pytest.mark.parametrize("name", STORED_KINDS)
def test_packed_blocks_hold_the_values_of_stored_ones(name, inputs, outputs):
    """Exactly: a scale times an integer needs at most 24 bits, so that only the sum is rounded."""
    kind, blocks = KINDS[name], random_blocks(name, outputs, inputs)
    panels = pack_blocks(kind, blocks)
    assert panels.shape == kind.packed_shape(outputs, inputs)
    expected = dequantized(name, blocks)
    assert len(np.unique(expected)) > 48
    np.testing.assert_array_equal(dense(kind, panels, outputs, inputs), expected)


@pytest.mark.parametrize("inputs", [32, 96])
@pytest.mark.parametrize("name", [name for name in STORED_KINDS if KINDS[name].block == 32])
def test_one_block_and_odd_numbers_of_blocks_are_packed(name, inputs):
    kind, blocks = KINDS[name], random_blocks(name, 33, inputs)
    values = dense(kind, pack_blocks(kind, blocks), 33, inputs)
    np.testing.assert_array_equal(values, dequantized(name, blocks))


@pytest.mark.parametrize("name", STORED_KINDS)
def test_many_panels_are_packed_as_one_is(name):
    """More than are packed at a time."""
    kind, blocks = KINDS[name], random_blocks(name, 160 * LANES + 5, 256)
    panels = pack_blocks(kind, blocks)
    for first in (0, 63, 159, 160):
        alone = pack_blocks(kind, blocks[first * LANES : (first + 1) * LANES])
        np.testing.assert_array_equal(panels[first : first + 1], alone)


@pytest.mark.parametrize("name", STORED_KINDS)
def test_the_lanes_of_absent_outputs_are_zero_bytes(name):
    kind, blocks = KINDS[name], random_blocks(name, 3, 256)
    alone, padded = pack_blocks(kind, blocks), pack_blocks(kind, np.tile(blocks, (11, 1))[:32])
    absent = np.count_nonzero(alone) / np.count_nonzero(padded)
    assert absent == pytest.approx(3 / 32, rel=0.1)
    np.testing.assert_array_equal(dense(kind, alone, 32, 256)[3:], 0)


def test_nibbles_lie_as_ggml_stores_them():
    """What a kernel counts on, spelled out once: lane 5's byte 6 of step 1, then its scale."""
    blocks = random_blocks("Q4_1", 32, 64)
    panel = pack_blocks(KINDS["Q4_1"], blocks)[0]
    assert panel[640 + 128 + 4 * 5 + 2] == blocks[5, 20 + 4 + 6]
    np.testing.assert_array_equal(panel[640 + 512 + 10 : 640 + 512 + 12], blocks[5, 20:22])
    np.testing.assert_array_equal(panel[640 + 576 + 10 : 640 + 576 + 12], blocks[5, 22:24])


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", [1, 32, 100])
def test_bfloat16_is_rounded_and_kept(outputs, inputs):
    weight = np.random.default_rng(0).normal(size=(outputs, inputs)).astype(np.float32)
    panels = np.asarray(jax.jit(pack_bfloat16)(weight))
    assert panels.shape == BFLOAT16.packed_shape(outputs, inputs)
    values = dense(BFLOAT16, panels, outputs, inputs)
    np.testing.assert_array_equal(values, weight.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.count_nonzero(panels.view(np.uint16)) == weight.size


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("inputs", [1, 64, 100])
def test_int8_is_kept(outputs, inputs):
    rng = np.random.default_rng(0)
    values = rng.integers(-128, 128, (outputs, inputs), dtype=np.int8)
    scales = rng.uniform(0.5, 2, outputs).astype(np.float32)
    panels = np.asarray(jax.jit(pack_int8)(values, scales))
    assert panels.shape == INT8.packed_shape(outputs, inputs)
    found = dense(INT8, panels, outputs, inputs)
    np.testing.assert_array_equal(found, values.astype(np.float32) * scales[:, None])
    rounded = 32 * len(panels)
    np.testing.assert_array_equal(dense(INT8, panels, rounded, 128)[outputs:], 0)
    if inputs == 100:  # what pads the inputs of an output that is there is the stored zero
        assert panels[0, 32 * 100] == 128


def test_floats_lie_as_the_kernel_decodes_them():
    """Lane 5's inputs 4 to 7 of its second block, in the order of pairs, and its scale."""
    blocks = random_blocks("F8_E4M3", 32, 256)
    block = pack_blocks(FLOAT8, blocks)[0, 4224:]
    np.testing.assert_array_equal(
        block[128 + 4 * 5 :][:4], blocks[5, 132 + 4 + 4 :][:4][[0, 2, 1, 3]]
    )
    np.testing.assert_array_equal(block[4096 + 4 * 5 :][:4], blocks[5, 132:136])


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_weights_of_experts_are_packed_one_after_the_other(name):
    weights = np.random.default_rng(0).normal(size=(3, 40, 100)).astype(np.float32)
    pack = jax.jit(pack_bfloat16 if name == "bfloat16" else lambda w: pack_int8(*quantize(w)))
    packed = [np.asarray(pack(weight)) for weight in weights]
    np.testing.assert_array_equal(pack(weights), np.concatenate(packed))


@pytest.mark.parametrize("name", GGML_KINDS)
def test_products_of_blocks_are_close_to_those_of_their_values(name):
    """int8 activations are off by up to half of 1/127 of the largest of 32."""
    kind, blocks = KINDS[name], random_blocks(name, 40, 512)
    panels = pack_blocks(kind, blocks)
    x = np.random.default_rng(1).normal(size=(3, 512)).astype(np.float32)
    x[1] *= 1000
    x[2] = 0
    weight = dense(kind, panels, 40, 512)
    bound = np.abs(x).reshape(3, -1, 32).max(axis=2, keepdims=True) / 254
    bound = np.broadcast_to(bound, (3, 16, 32)).reshape(3, 512) @ np.abs(weight).T
    error = np.abs(product(x, kind, panels, 40) - x @ weight.T)
    assert np.all(error <= bound * 1.001)
    assert np.all(error[:2].mean(axis=1) < bound[:2].mean(axis=1) / 10)  # roundings cancel
    assert np.all(error[:2].mean(axis=1) > 0)


def test_products_of_bfloat16_are_those_of_its_values():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(2, 3, 100)).astype(ml_dtypes.bfloat16).astype(np.float32)
    panels = np.asarray(pack_bfloat16(jnp.asarray(weight)))
    np.testing.assert_allclose(product(x, BFLOAT16, panels, 3), x @ weight.T, rtol=1e-4, atol=1e-5)


def test_products_of_float8_are_those_of_its_values():
    x = np.random.default_rng(0).normal(size=(3, 256)).astype(ml_dtypes.bfloat16)
    blocks = random_blocks("F8_E4M3", 40, 256)
    found = product(x.astype(np.float32), FLOAT8, pack_blocks(FLOAT8, blocks), 40)
    want = x.astype(np.float64) @ dequantized("F8_E4M3", blocks).T
    np.testing.assert_allclose(found, want, atol=1e-6 * np.abs(want).max())


def test_products_of_int8_are_those_of_the_quantised_weights():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 100)).astype(np.float32)
    weight = quantize(rng.normal(size=(40, 100)).astype(np.float32))
    panels = np.asarray(pack_int8(*weight))
    expected = integer_product(digits(jnp.asarray(x)), weight)
    np.testing.assert_allclose(product(x, INT8, panels, 40), expected, rtol=1e-5, atol=1e-5)
