"""A row's sum has the same bits whatever rows are summed beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.rows import LONG, Norm, rms_norm, row_sum
from ssd_jax.models.sharding import TENSOR_AXIS, mesh_of
from ssd_jax.tools.aot import hlo
from tests.selection import cases

pytestmark = pytest.mark.shipped

COUNTS = (1, 2, 3, 5, 8, 9, 16, 40, 108, 513)
WIDTHS = (8, 64, 576, LONG, LONG + 100)


def block(width: int) -> np.ndarray:
    """Rows of both signs and many magnitudes, whose sums round in every addition."""
    rng = np.random.default_rng(width)
    scales = np.exp2(rng.integers(-12, 12, (max(COUNTS), width)))
    return (rng.normal(0, 1, scales.shape) * scales).astype(np.float32)


def squares(x):
    return row_sum(jnp.square(x))


@pytest.mark.parametrize("width", cases(WIDTHS, 576, 4196))
@pytest.mark.parametrize("function", [row_sum, squares], ids=["stored", "computed"])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows_or_its_place(width, function):
    x = block(width)
    run = jax.jit(function)
    alone = np.concatenate([np.asarray(run(row[None])) for row in x])
    for count in COUNTS:
        for first in {0, (len(x) - count) // 2, len(x) - count}:
            here = slice(first, first + count)
            np.testing.assert_array_equal(np.asarray(run(x[here])), alone[here])


@pytest.mark.parametrize("width", [64, 576])
def test_a_norm_has_the_same_bits_fused_or_not(width):
    x, weight = jnp.asarray(block(width)), jnp.ones(width, jnp.float32)
    fused = jax.jit(lambda x: rms_norm(x, Norm(weight, 1e-5)))(x)
    with jax.disable_jit():
        one_by_one = rms_norm(x, Norm(weight, 1e-5))
    np.testing.assert_array_equal(np.asarray(fused), np.asarray(one_by_one))


@pytest.mark.parametrize("width", WIDTHS)
def test_leading_axes_are_rows(width):
    x = block(width)
    shaped = np.asarray(jax.jit(row_sum)(x.reshape(9, 19, 3, width)))
    assert shaped.shape == (9, 19, 3, 1)
    np.testing.assert_array_equal(shaped.reshape(-1, 1), np.asarray(jax.jit(row_sum)(x)))


@pytest.mark.parametrize("width", WIDTHS)
def test_row_sum_is_the_sum_over_the_last_axis(width):
    x = block(width)
    exact = x.astype(np.float64).sum(-1, keepdims=True)
    # Rounding is of the order of the largest partial sum, not of the result.
    allowed = 1e-6 * np.abs(x).sum(-1, keepdims=True)
    assert (np.abs(np.asarray(jax.jit(row_sum)(x)) - exact) <= allowed).all()


@pytest.mark.parametrize("width", [7, 576])
def test_the_gradient_of_row_sum_is_that_of_a_sum(width):
    x, weights = jnp.asarray(block(width)), jnp.arange(max(COUNTS), dtype=jnp.float32)
    found = jax.grad(lambda x: (row_sum(x)[:, 0] * weights).sum())(x)
    np.testing.assert_array_equal(found, np.broadcast_to(weights[:, None], x.shape))


def test_devices_that_share_an_axis_of_rows_send_nothing():
    shared = jax.NamedSharding(
        mesh_of(jax.devices()[:4]), jax.sharding.PartitionSpec(None, TENSOR_AXIS)
    )
    x = jax.ShapeDtypeStruct((2, 4, 5, 64), np.float32, sharding=shared)
    text = jax.jit(row_sum, out_shardings=shared).lower(x).compile().as_text()
    assert not hlo.read(text).collectives()
