"""Weights in groups: products of the values that they have."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.kernels.linear import api, groups
from ssd_jax.kernels.linear.api import GroupQuantized, ScaledSums

DTYPES = ("int4", "int8", "float8_e4m3fn")


def weight(dtype, group=32, *, minima=False, outputs=24, inputs=256):
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 8, (outputs, inputs)).astype(dtype)
    shape = outputs, inputs // group
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    lows = rng.normal(size=shape).astype(np.float32) if minima else None
    stored = StoredGroups(values, scales, lows).arranged()
    return GroupQuantized(*(None if part is None else jnp.asarray(part) for part in stored))


def values(weight):
    """The values, in float32."""
    values, scales, minima = (None if part is None else np.asarray(part) for part in weight)
    found = np.stack(
        [
            [
                np.float32(values[group, place, output]) * scales[group, output]
                + (0 if minima is None else minima[group, output])
                for group in range(values.shape[0])
                for place in range(values.shape[1])
            ]
            for output in range(values.shape[2])
        ]
    )
    return found.astype(np.float32)


def dense(weight):
    """The values, rounded to bfloat16 once."""
    return values(weight).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("group", [16, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_weight_in_bfloat16(dtype, group, minima):
    quantised = weight(dtype, group, minima=minima)
    plain = jnp.asarray(dense(quantised))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 256)), jnp.float32)
    found, want = (jax.jit(lambda x, w: api.products(x, [w])[0])(x, w) for w in (quantised, plain))
    # XLA may round a product and a sum once, and values between two of bfloat16 go elsewhere.
    bound = 2**-8 * np.abs(np.asarray(x)) @ np.abs(np.asarray(plain, np.float32)).T
    assert np.all(np.abs(found - want) <= (bound if minima else 1e-6 * np.abs(want).max()))


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize(("group", "rows"), [(32, 3), (32, 8), (256, 9)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled_sums_of_few_rows_are_those_of_values_that_are_not_rounded(
    dtype, group, rows, minima
):
    quantised = weight(dtype, group, minima=minima)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 256)), jnp.bfloat16)
    [found] = jax.jit(lambda x, w: api.products(x, [ScaledSums(*w)]))(x, quantised)
    want = x.astype(np.float64) @ values(quantised).astype(np.float64).T
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())


def test_many_rows_are_multiplied_with_values():
    quantised, x = weight("int4"), jnp.ones((9, 256))
    [found], [want] = (api.products(x, [w]) for w in (ScaledSums(*quantised), quantised))
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_looked_up(dtype):
    quantised, at = weight(dtype, minima=True), jnp.asarray([23, 0, 7], jnp.int32)
    found = jax.jit(api.take)(quantised, at)
    np.testing.assert_allclose(found, dense(quantised).astype(np.float32)[at], rtol=2**-8)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: w._replace(scales=jnp.roll(w.scales, 1, axis=0)),
        lambda w: w._replace(minima=-w.minima),
        lambda w: w._replace(values=w.values.reshape(8, 16, 2, 24)[:, :, ::-1].reshape(8, 32, 24)),
    ],
    ids=["a group's scale of the next", "minima subtracted", "nibbles in the other order"],
)
def test_a_wrong_part_leaves_the_bound(wrong):
    quantised = weight("int4", minima=True)
    found = groups.dequantize(wrong(quantised)).astype(jnp.float32).reshape(256, 24).T
    off = np.abs(found - dense(quantised).astype(np.float32))
    assert off.max() > 0.5
