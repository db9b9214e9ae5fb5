"""Experts' weights of few bits whose groups of inputs have scales, as accelerators hold them.

A value is number * scale + minimum, the last two those of its output and of its group of inputs,
computed in float32 and rounded to bfloat16, as in `linear/groups.py`.

Numbers of 8 bits are an array [E, inputs, outputs]. Of 4 bits, a word of an output has eight
inputs: words 8b to 8b + 7 have inputs 64b to 64b + 63, of which word 8b + r has 64b + 8i + r in its
bits 4i to 4i + 3. So eight inputs that follow each other are the same bits of eight words that do:
on a TPU, of one vector. Inputs are rounded up to 64; where devices share them, those of each.

In MXFP4 the numbers are floats of E2M1 and a scale is the exponent of a power of two, plus 127. A
word has four exponents: of n words of an output, word r has group r + i n in byte i. The
numbers' bits are E2M1's, but 1/2 has those of 0, and zeros those of 1/2: then bits of an exponent
and a mantissa give every number but 0 without a denormal one, which a TPU would take for 0.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Float32, Int32, Shaped

from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm

BLOCK = 64
"""Inputs of eight words."""
LEAST_GROUP = 8
"""Inputs of a word, and of the smallest group."""
_LANES = 128
_EXPONENTS = 4  # of a word
_SIGN, _FIELDS = -0x80000000, 0x01C00000  # of float32: the sign, and where E2M1's other bits go
_ZERO = 0x00400000  # the bits of what stands for 0
_RECODED = np.asarray([1, 0, 2, 3, 4, 5, 6, 7, 1, 8, 10, 11, 12, 13, 14, 15], np.uint8)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "minima"),
    meta_fields=("group", "outputs"),
)
@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """A matrix of every expert in groups of inputs.

    Arrays have a multiple of 8 rows and, of a device, of 128 columns, the last of which mean
    nothing: these are tiles of a TPU, and where an array does not fill them, XLA has the experts in
    a tile, and copies all for the kernel.

    Attributes:
      values: int32 words of numbers of 4 bits, or numbers of 8 bits.
      scales: of groups, in float32; or int32 words of exponents, of MXFP4.
      minima: of groups; None stands for zeros.
      group: inputs of a group.
      outputs: of a device.
    """

    values: Shaped[Array, "*experts rows columns"]
    scales: Shaped[Array, "*experts _ columns"]
    minima: Float32[Array, "*experts _ columns"] | None
    group: int
    outputs: int

    @property
    def has_words(self) -> bool:
        """Whether numbers have 4 bits."""
        return self.values.dtype == jnp.int32

    @property
    def has_exponents(self) -> bool:
        """Whether it is in MXFP4."""
        return self.scales.dtype == jnp.int32


class ExpertGroupStructs(NamedTuple):
    """Shape, dtype and sharding of each array of an `ExpertGroups`, and its form on a device."""

    values: jax.ShapeDtypeStruct
    scales: jax.ShapeDtypeStruct
    minima: jax.ShapeDtypeStruct | None
    form: GroupForm


def device_form(form: GroupForm, inputs: int) -> GroupForm | None:
    """The form in which a device holds so many inputs of a weight; None if groups would be too
    small."""
    form = form.divided(inputs)
    form = form.divided(BLOCK) if form.group % BLOCK else form
    return None if form.group % LEAST_GROUP else form


def rows(form: GroupForm, inputs: int) -> int:
    """Rows of the values of so many inputs of a device."""
    return -(-inputs // BLOCK) * (LEAST_GROUP if form.bits == 4 else BLOCK)


def columns(outputs: int) -> int:
    """Columns of the arrays of so many outputs of a device."""
    return -(-outputs // _LANES) * _LANES


def scale_rows(form: GroupForm, inputs: int) -> int:
    """Rows of the scales of so many inputs of a device."""
    groups = inputs // form.group
    return -(-groups // (8 * _EXPONENTS if form.dtype == FLOAT4 else 8)) * 8


def stored_values(
    form: GroupForm, numbers: Shaped[np.ndarray, "outputs inputs"]
) -> Shaped[np.ndarray, "rows columns"]:
    """The values of an expert on a device, from their numbers; of E2M1, from its bits."""
    numbers = np.pad(numbers, ((0, -len(numbers) % _LANES), (0, -numbers.shape[1] % BLOCK)))
    outputs = len(numbers)
    if form.bits == 8:
        return numbers.T
    codes = _RECODED[numbers] if form.dtype == FLOAT4 else numbers.view(np.uint8) & np.uint8(15)
    pairs = codes.reshape(outputs, -1, 4, 2, 8)  # blocks, bytes of a word, halves, words
    stored = pairs[:, :, :, 0] | pairs[:, :, :, 1] << np.uint8(4)
    ordered = np.ascontiguousarray(stored.transpose(1, 3, 0, 2))
    return ordered.view("<i4").reshape(-1, outputs)


def stored_scales(
    form: GroupForm, scales: Shaped[np.ndarray, "outputs groups"]
) -> Shaped[np.ndarray, "rows columns"]:
    """The scales of an expert on a device, or its minima."""
    rows = scale_rows(form, scales.shape[1] * form.group)
    count = rows * (_EXPONENTS if form.dtype == FLOAT4 else 1)
    beyond = (0, -len(scales) % _LANES), (0, count - scales.shape[1])
    padded = np.pad(scales, beyond).T
    if form.dtype != FLOAT4:
        return padded
    ordered = padded.reshape(_EXPONENTS, rows, -1).transpose(1, 2, 0)
    return np.ascontiguousarray(ordered).view("<i4")[..., 0]


def numbers(
    word: Int32[Array, "..."], place: int | Int32[Array, "..."], *, is_e2m1: bool
) -> Shaped[Array, "..."]:
    """The numbers at a place, 0 to 7, of words, in float32. Those of E2M1 are its bits: to give a
    value, the bits of its power of two, `exponent_bits`, are added, and `_ZERO` means 0."""
    highest = word << (28 - 4 * place)
    if is_e2m1:
        return (highest >> 6) & jnp.int32(_SIGN | _FIELDS)
    return (highest >> 28).astype(jnp.float32)


def exponent_bits(
    words: Int32[Array, "*rows outputs"], place: int | Int32[Array, "..."]
) -> Int32[Array, "..."]:
    """What is added to bits of E2M1 to make those of their values, from a byte of words."""
    return (((words >> (8 * place)) & 255) - 1) << 23  # the bits 0 stand for 1/2


def scaled_bits(
    bits: Int32[Array, "*rows outputs"], exponents: Int32[Array, "*rows outputs"]
) -> Float32[Array, "*rows outputs"]:
    """Values, from bits of E2M1 and `exponent_bits`."""
    values = jax.lax.bitcast_convert_type(bits + exponents, jnp.float32)
    return jnp.where(bits == _ZERO, 0.0, values)


def dequantize(weight: ExpertGroups, inputs: int) -> BFloat16[Array, "*experts {inputs} outputs"]:
    """The values of a weight of so many inputs, of one device."""
    values = weight.values
    if weight.has_words:
        blocks = values.reshape(*values.shape[:-2], -1, 1, 8, values.shape[-1])
        places = jnp.arange(8, dtype=jnp.int32)[:, None, None]
        values = numbers(blocks, places, is_e2m1=weight.has_exponents)
        values = values.reshape(*weight.values.shape[:-2], -1, values.shape[-1])
    else:
        values = values.astype(jnp.float32)
    values = values[..., :inputs, :]

    def spread(array: jax.Array) -> jax.Array:
        groups = array[..., : inputs // weight.group, :]
        return jnp.repeat(groups, weight.group, axis=-2)

    if weight.has_exponents:
        places = jnp.arange(_EXPONENTS, dtype=jnp.int32)[:, None, None]
        exponents = exponent_bits(weight.scales[..., None, :, :], places)
        exponents = exponents.reshape(*exponents.shape[:-3], -1, exponents.shape[-1])
        values = scaled_bits(values, spread(exponents))
        return values[..., : weight.outputs].astype(jnp.bfloat16)
    values = values * spread(weight.scales)
    if weight.minima is not None:
        values = values + spread(weight.minima)
    return values[..., : weight.outputs].astype(jnp.bfloat16)


def product(x: Float[Array, "n inputs"], weight: ExpertGroups) -> Float32[Array, "n outputs"]:
    """x @ weight^T of one expert, of values and activations in bfloat16."""
    return jax.lax.dot_general(
        x.astype(jnp.bfloat16),
        dequantize(weight, x.shape[1]),
        (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
