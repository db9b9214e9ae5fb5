"""int8 products: weights with a scale a channel, activations with a scale a token, int32 sums.

The scales of both sides factor out of the sum over the shared axis, so the sum itself is of
integers: exact in any order, and the same for a row alone as among others.

One int8 an activation is not enough: a few channels of a token are many times larger than the rest,
which a scale that fits them rounds away (SmolLM2's perplexity rises by 4%). So an activation has
two digits, the second being the remainder of the first, and a token's digits are two rows of one
product. A few rows cost no more than one, since the weights, which bound the time, are read once. A
draft, whose branches are many rows and whose guesses are verified, may use one digit (W8A8).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32

LARGEST = 127
"""Largest int8 value used; -128 is not used, so a row and its negative are treated alike."""

DIGIT = 2 * LARGEST
"""Ratio of the digits' weights: the remainder of the first digit is at most a half."""

_SMALLEST_ABSMAX = 1e-30
"""Stands in for the absmax of a row of zeros; its scale is still a normal float32."""


class Quantized(NamedTuple):
    """A weight, or one of every expert: row i is values[i] * scales[i]."""

    values: Int8[Array, "*experts outputs inputs"]
    scales: Float32[Array, "*experts outputs"]


class W8A8(Quantized):
    """A weight whose products use one digit of each activation."""


class Digits(NamedTuple):
    """Activations: row i is (high[i] + low[i] / DIGIT) * scales[i]; low=None stands for zeros."""

    high: Int8[Array, "n inputs"]
    low: Int8[Array, "n inputs"] | None
    scales: Float32[Array, "n"]


def quantize(weight: Float[Array, "*experts outputs inputs"]) -> Quantized:
    """Quantises each row by its own largest magnitude.

    Rounds to nearest, ties to even: no value is off by more than half its row's scale.
    """
    weight = weight.astype(jnp.float32)
    scales = _scales(weight)
    return Quantized(jnp.round(weight / scales[..., None]).astype(jnp.int8), scales)


def digits(x: Float32[Array, "n inputs"], *, single: bool = False) -> Digits:
    """Splits each row into digits, by its own largest magnitude.

    Up to float32 rounding, no value is off by more than half its row's scale / DIGIT; with `single`
    digit, by half its row's scale.
    """
    scales = _scales(x)
    units = x / scales[:, None]
    high = jnp.round(units)
    if single:
        return Digits(high.astype(jnp.int8), None, scales)
    low = jnp.round((units - high) * DIGIT)
    return Digits(high.astype(jnp.int8), low.astype(jnp.int8), scales)


def take(weight: Quantized, indices: Int32[Array, "n"]) -> Float32[Array, "n inputs"]:
    """Rows of a weight."""
    return weight.values[indices] * weight.scales[indices][:, None]


def integer_product(x: Digits, weight: Quantized) -> Float32[Array, "n outputs"]:
    """x @ weight^T, summed in int32 and scaled. A sum cannot overflow below 133,000 terms."""
    contract_in = (((1,), (1,)), ((), ()))
    rows = x.high if x.low is None else jnp.concatenate([x.high, x.low])
    sums = jax.lax.dot_general(rows, weight.values, contract_in, preferred_element_type=jnp.int32)
    units = sums.astype(jnp.float32)
    if x.low is not None:
        high, low = jnp.split(units, 2)
        units = high + low / DIGIT
    return units * x.scales[:, None] * weight.scales


def _scales(x: Float32[Array, "*rows inputs"]) -> Float32[Array, "*rows"]:
    return jnp.maximum(jnp.max(jnp.abs(x), axis=-1), _SMALLEST_ABSMAX) / LARGEST
