"""What the kernel of `pallas_tpu.py` reads of rows and of weights, and how it multiplies them.

Numbers of few bits become bfloat16 on the chip, eight inputs at a time. The vector unit does that,
in float32: for a number of E2M1 three operations on bits, one that adds its group's exponent, two
that give 0, and half a one that joins two bfloat16; for an integer two on bits, a conversion, and
the product with its scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32

from ssd_jax.kernels.experts.groups import (
    BLOCK,
    LEAST_GROUP,
    ExpertGroups,
    exponent_bits,
    numbers,
    scaled_bits,
)
from ssd_jax.kernels.linear.quantized import DIGIT, W8A8, Quantized, digits
from ssd_jax.kernels.precision import precision

_LANES = 128

Refs = Sequence[Any]


class OfExperts(NamedTuple):
    """An array [experts, _, _], and which axis has the outputs of a weight: 1 or 2; or a row of
    outputs of each expert, with outputs_at=None."""

    array: jax.Array
    outputs_at: Literal[1, 2] | None


class ProductOperands(NamedTuple):
    """The operands of products with experts' weights.

    Attributes:
      rows: arrays with a row for each of x.
      weights: the arrays of each weight, with the experts of all layers.
      outputs: of a weight.
      output_bytes: that an output takes in the chip's memory.
      product: from what a step has of `rows` and of a weight, and scratch, the sums of its rows.
      products: multiplications of each row with a weight.
      scratch: what `product` needs besides, by the outputs of a step.
    """

    rows: list[jax.Array]
    weights: list[list[OfExperts]]
    outputs: int
    output_bytes: int
    product: Callable[[Refs, Refs, Refs], jax.Array]
    products: int = 1
    scratch: Callable[[int], list[Any]] = lambda part: []


def operands_of(x: Float32[Array, "m inputs"], weights: Sequence[Any]) -> ProductOperands | None:
    """The operands of x and of weights of one kind; None of several kinds."""
    if len({_kind(weight) for weight in weights}) > 1:
        return None
    if isinstance(weights[0], ExpertGroups):
        return _of_groups(x, weights)
    return (_of_integers if isinstance(weights[0], Quantized) else _of_floats)(x, weights)


def _kind(weight: Any) -> Any:
    return jax.tree.structure(weight), *(
        (leaf.dtype, leaf.shape) for leaf in jax.tree.leaves(weight)
    )


def _of_floats(x: jax.Array, weights: Sequence[jax.Array]) -> ProductOperands:
    arrays, dtype = [_matrices(weight) for weight in weights], weights[0].dtype

    def product(rows: Refs, weight: Refs, _: Refs) -> jax.Array:
        return _sums(rows[0][...], weight[0][0], _inputs_at(arrays[0]))

    return ProductOperands(
        rows=[x.astype(dtype)],
        weights=[[array] for array in arrays],
        outputs=weights[0].shape[-2],
        output_bytes=x.shape[1] * dtype.itemsize,
        product=product,
    )


def _of_integers(x: jax.Array, weights: Sequence[Quantized]) -> ProductOperands:
    """The scales of rows follow their digits, those of outputs the values."""
    high, low, of_rows = digits(x, single=isinstance(weights[0], W8A8))
    of_digits = [high] if low is None else [high, low]
    outputs = weights[0].scales.shape[-1]
    arrays = [
        [_matrices(weight.values), OfExperts(weight.scales.reshape(-1, outputs), None)]
        for weight in weights
    ]

    def product(rows: Refs, weight: Refs, _: Refs) -> jax.Array:
        values, scales = weight
        inputs_at = _inputs_at(arrays[0][0])
        sums = [_sums(digit[...], values[0], inputs_at) for digit in rows[:-1]]
        units = sums[0] if len(sums) == 1 else sums[0] + sums[1] / DIGIT
        return units * rows[-1][...] * scales[0]

    return ProductOperands(
        rows=[*of_digits, of_rows[:, None]],
        weights=arrays,
        outputs=outputs,
        output_bytes=x.shape[1],
        product=product,
        products=len(of_digits),
    )


def _matrices(weight: jax.Array) -> OfExperts:
    """Matrices as they lie in memory: where inputs do not fill vectors, XLA has outputs side by
    side."""
    *_, outputs, inputs = weight.shape
    array = weight.reshape(-1, outputs, inputs)
    if inputs % _LANES and not outputs % _LANES:
        return OfExperts(array.swapaxes(1, 2), 2)
    return OfExperts(array, 1)


def _inputs_at(matrices: OfExperts) -> int:
    return 2 if matrices.outputs_at == 1 else 1


def _sums(x: jax.Array, weight: jax.Array, inputs_at: int) -> jax.Array:
    """x times a weight, whose inputs are its axis `inputs_at`, 1 or 2 with the experts' axis, in
    float32; of integers exact."""
    integers = jnp.issubdtype(weight.dtype, jnp.integer)
    sums = jax.lax.dot_general(
        x,
        weight,
        (((1,), (inputs_at - 1,)), ((), ())),
        precision=precision(weight),
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )
    return sums.astype(jnp.float32)


def _of_groups(x: jax.Array, weights: Sequence[ExpertGroups]) -> ProductOperands:
    """Values, scales and perhaps minima; scratch has an expert's values, and scales as they are
    added or multiplied."""
    first, inputs = weights[0], x.shape[1]
    rows, columns = first.scales.shape[-2:]
    padded = -(-inputs // BLOCK) * BLOCK

    def scratch(part: int) -> list[Any]:
        dense = pltpu.VMEM((padded, part), jnp.bfloat16)
        return [dense, *([pltpu.VMEM((4 * rows, part), jnp.int32)] * first.has_exponents)]

    def product(rows_of_step: Refs, weight: Refs, memory: Refs) -> jax.Array:
        values, *factors = (ref.at[0] for ref in weight)
        dense, *exponents = memory
        for spread in exponents:
            for place in range(4):
                spread[pl.ds(place * rows, rows), :] = exponent_bits(factors[0][...], place)
        factors = exponents or factors
        convert = partial(_convert, values, factors, dense, eights=first.group // LEAST_GROUP)
        jax.lax.fori_loop(0, padded // BLOCK, lambda block, _: convert(block), None)
        return _sums(rows_of_step[0][...], dense[...], 1)

    return ProductOperands(
        rows=[jnp.pad(x.astype(jnp.bfloat16), ((0, 0), (0, padded - inputs)))],
        weights=[
            [
                OfExperts(array.reshape(-1, *array.shape[-2:]), 2)
                for array in jax.tree.leaves(weight)
            ]
            for weight in weights
        ],
        outputs=columns,
        output_bytes=2 * padded,
        product=product,
        scratch=scratch,
    )


def _convert(values: Any, factors: Refs, dense: Any, block: jax.Array, *, eights: int) -> None:
    """Makes the values of a block of inputs, eight at a time, of groups of so many eights."""
    scales, *minima = factors
    is_e2m1 = scales.dtype == jnp.int32

    def of_group(array: Any, place: int) -> jax.Array:
        if eights < 8:
            group = block * (8 // eights) + place // eights
        else:
            group = jax.lax.div(block, eights // 8)
        group = jnp.minimum(group, array.shape[0] - 1)  # of inputs that are not there
        return jnp.broadcast_to(array[pl.ds(group, 1), :], (LEAST_GROUP, array.shape[1]))

    if values.dtype == jnp.int32:
        word = values[pl.ds(pl.multiple_of(block * LEAST_GROUP, LEAST_GROUP), LEAST_GROUP), :]
        parts = [numbers(word, place, is_e2m1=is_e2m1) for place in range(8)]
    else:
        start = pl.multiple_of(block * BLOCK, BLOCK)
        stored = values[pl.ds(start, BLOCK), :].astype(jnp.float32)
        parts = jnp.split(stored, 8)
    for place, number in enumerate(parts):
        scale = of_group(scales, place)
        parts[place] = scaled_bits(number, scale) if is_e2m1 else number * scale
        if minima:
            parts[place] += of_group(minima[0], place)
    rows = pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK)
    dense[rows, :] = jnp.concatenate(parts).astype(jnp.bfloat16)
