"""int8 products: exact sums, bounded rounding, rows that do not depend on each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.linear.quantized import (
    DIGIT,
    LARGEST,
    W8A8,
    Digits,
    Quantized,
    digits,
    integer_product,
    quantize,
    take,
)
from ssd_jax.kernels.linear.xla import product

WIDTH, OUT = 200, 37


def random(*shape, seed=0, spread=3.0):
    """Rows whose sizes differ by orders of magnitude."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(0, spread, (shape[0], 1)))
    return jnp.asarray(rng.normal(size=shape) * size, jnp.float32)


def test_a_product_is_the_exact_integer_sum_times_both_scales():
    rng = np.random.default_rng(0)
    high, low = (rng.integers(-127, 128, (5, 9000), np.int8) for _ in range(2))
    values = rng.integers(-127, 128, (OUT, 9000), np.int8)
    values[0], high[0], low[0] = 127, 127, 127  # the largest sums there are
    x_scales = rng.uniform(0.1, 2, 5).astype(np.float32)
    scales = rng.uniform(0.1, 2, OUT).astype(np.float32)
    got = integer_product(
        Digits(*map(jnp.asarray, (high, low, x_scales))),
        Quantized(*map(jnp.asarray, (values, scales))),
    )
    sums = DIGIT * (high.astype(np.int64) @ values.T) + low.astype(np.int64) @ values.T
    assert sums[0, 0] == 255 * 127 * 127 * 9000
    expected = sums / DIGIT * x_scales[:, None].astype(np.float64) * scales
    # The first and second digit's sums are rounded to float32 before they meet.
    room = 2e-7 * np.abs(high.astype(np.int64) @ values.T).max() * x_scales[:, None] * scales
    np.testing.assert_array_less(np.abs(np.asarray(got) - expected), room + 1e-6)


def test_a_weight_is_off_by_at_most_half_a_scale_and_each_row_uses_its_range():
    weight = random(OUT, WIDTH)
    rows = quantize(weight)
    assert rows.values.dtype == jnp.int8
    np.testing.assert_array_equal(np.abs(rows.values).max(axis=1), LARGEST)
    back = np.asarray(take(rows, jnp.arange(OUT)))
    allowed = np.asarray(rows.scales)[:, None] * 0.50001
    assert (np.abs(back - weight) <= allowed).all()
    assert (np.abs(back - weight) > 0.9 * allowed).any()


def test_ties_round_to_even():
    scaled = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    assert quantize(jnp.asarray(scaled)).values[0].tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_two_digits_of_an_activation_are_off_by_at_most_half_a_second_digit():
    x = random(OUT, WIDTH)
    both = digits(x)
    back = (np.asarray(both.high) + np.asarray(both.low, np.float64) / DIGIT) * np.asarray(
        both.scales
    )[:, None]
    allowed = np.asarray(both.scales)[:, None] / DIGIT * 0.51  # units are float32
    assert (np.abs(back - x) <= allowed).all()
    assert np.abs(both.low).max() == LARGEST


def test_one_digit_is_the_first_of_two():
    x, weight = random(5, WIDTH), quantize(random(OUT, WIDTH, seed=1))
    both, first = digits(x), digits(x, single=True)
    np.testing.assert_array_equal(first.high, both.high)
    assert first.low is None
    zeros = Digits(both.high, jnp.zeros_like(both.low), both.scales)
    got = product(x, W8A8(*weight))
    np.testing.assert_array_equal(got, integer_product(zeros, weight))
    assert (np.asarray(got) != np.asarray(product(x, weight))).mean() > 0.9
    for none in (weight, W8A8(*weight)):
        assert product(x[:0], none).shape == (0, OUT)


@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-25, 1e30])
def test_zeros_and_tiny_and_huge_values_stay_finite(value):
    x = jnp.full((1, WIDTH), value, jnp.float32)
    weight = quantize(jnp.full((OUT, WIDTH), 1e-3, jnp.float32))
    got = np.asarray(integer_product(digits(x), weight))
    np.testing.assert_allclose(got, value * WIDTH * 1e-3, rtol=1e-2, atol=1e-29)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_close_to_the_float_one(dtype):
    x, weight = random(8, WIDTH, seed=1), random(OUT, WIDTH, seed=2).astype(dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1)
    got = np.asarray(product(x, quantize(weight)))
    assert (np.abs(got - exact) < 4e-3 * norms).all()


def test_a_row_is_the_same_bits_whatever_rows_it_is_among():
    x, weight = random(17, WIDTH), quantize(random(OUT, WIDTH, seed=1))
    run = jax.jit(product)
    among = np.asarray(run(x, weight))
    for count in (1, 2, 3, 8, 16):
        np.testing.assert_array_equal(np.asarray(run(x[:count], weight)), among[:count])
    reversed_rows = np.asarray(run(x[::-1], weight))
    np.testing.assert_array_equal(reversed_rows[::-1], among)


def test_products_of_one_input_quantise_it_once():
    x = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    weight = jax.eval_shape(quantize, jax.ShapeDtypeStruct((OUT, WIDTH), jnp.float32))

    def outputs(count, x, weights):
        return [product(x, weight) for weight in weights[:count]]

    def roundings(count):
        compiled = jax.jit(functools.partial(outputs, count)).lower(x, [weight] * 3).compile()
        return (compiled.as_text() or "").count("round-nearest-even(")

    assert roundings(3) == roundings(1) > 0
