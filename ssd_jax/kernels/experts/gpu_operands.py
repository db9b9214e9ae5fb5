"""What the kernel of `pallas_gpu.py` reads of a weight, and how it multiplies with that.

A chunk of inputs of some outputs is the left operand of products. One of bfloat16, or of int8 with
a scale for each output, is multiplied from the shared memory where it arrives. Of numbers in groups
a thread takes words of two outputs to its registers and makes bfloat16 there: in the layout of a
left operand a word's eight inputs are in eight matrices side by side, so that nothing moves between
threads but the words themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Shaped

from ssd_jax.kernels.experts.groups import (
    BLOCK,
    LEAST_GROUP,
    ExpertGroups,
    exponent_bits,
    numbers,
    scaled_bits,
)
from ssd_jax.kernels.linear.quantized import DIGIT, W8A8, Quantized, digits

OUTPUTS = 64
"""Of a chunk: as many as `wgmma` multiplies at once."""
MOST_SCALE_BYTES = 64 << 10
"""Of the scales and minima of so many outputs, all of which are in shared memory."""
_CHUNK_BYTES = (256, 128, 64, 32)  # of an output at a time: the first that divides its own
_LEAST_INPUTS = 32  # that inputs have as a divisor
_BLOCKS = (4, 3, 2, 1)  # the same, of numbers of few bits
_COPIED_ROWS = 256  # that a copy may have
_ROW = plgpu.Layout.WGMMA.reduce(1)
_load: Any = plgpu.load  # its signature differs before JAX 0.12

Ref = Any
"""Ref of an array in one of a GPU's memories."""
Tile = Any
"""An array in registers, with a layout."""


class GridBlock(NamedTuple):
    """What a block of the grid multiplies with: some outputs of an expert's weight.

    Attributes:
      arrays: of the weight, in the GPU's memory.
      memory: what `Operand.scratch` asks for.
      expert: its number.
      part: its outputs.
    """

    arrays: Sequence[Ref]
    memory: Sequence[Ref]
    expert: jax.Array
    part: Any


class Rows(NamedTuple):
    """What products have of rows: row i is the sum of what is made of values[...][i] (see
    `Operand.total`), times scales[i]; None stands for ones.

    Attributes:
      values: of one type, which is the weight's.
    """

    values: Sequence[Shaped[Array, "m padded"]]
    scales: Float32[Array, "m"] | None = None


class Operand(Protocol):
    """A weight of all experts, whose arrays are each [E, _, _].

    Attributes:
      outputs: of the weight.
      room: outputs that arrays have.
      inputs: that rows must have.
      chunk: inputs of a slot of shared memory.
      chunk_bytes: of that slot.
      ring_bytes: that slots may take, rows included, where several rows do not need more.
      expert_bytes: that are read of an expert.
      sum_dtype: of what products are added to.
    """

    outputs: int
    room: int
    inputs: int
    chunk: int
    chunk_bytes: int
    ring_bytes: int
    expert_bytes: int
    sum_dtype: Any

    def rows(self, x: Float32[Array, "m inputs"]) -> Rows:
        """What rows are multiplied as."""
        ...

    def scratch(self, slots: int) -> list[Any]:
        """Shared memory and barriers that it needs."""
        ...

    def begin(self, block: GridBlock) -> None:
        """Fetches what all chunks need."""
        ...

    def fetch(self, block: GridBlock, index: Any, slot: Any, arrived: Ref) -> None:
        """Fetches a chunk to a slot, in one copy, at whose end it arrives at a barrier."""
        ...

    def wait(self, block: GridBlock) -> None:
        """Waits for what `begin` fetches."""
        ...

    def pairs(
        self, block: GridBlock, index: Any, slot: Any, rows: Ref
    ) -> Iterator[tuple[Ref | Tile, Ref]]:
        """Operands whose products make those of a chunk, one after the other.

        Args:
          rows: [block, chunk], of activations; of several values of each, one after the other.
        """
        ...

    def total(self, sums: Tile) -> Tile:
        """The sums of rows [OUTPUTS, block], of those of all their values."""
        ...


def arrays_of(weight: Any) -> list[jax.Array]:
    """The arrays of a weight that the kernel reads, its values first."""
    return [weight.values] if isinstance(weight, Quantized) else jax.tree.leaves(weight)


def operand_of(weight: Any, inputs: int, *, interpret: bool) -> Operand:
    """The operand of a weight of so many inputs."""
    if isinstance(weight, ExpertGroups):
        return _Groups(weight, inputs, interpret=interpret)
    return _Integers(weight) if isinstance(weight, Quantized) else _Floats(weight)


def why_not(outputs: int, inputs: int, dtype: Any) -> str | None:
    """Why no operand has weights [E, outputs, inputs] of a type, in one line, or None."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.int8):
        return f"weights of {jnp.dtype(dtype).name}: it needs bfloat16, int8, or groups"
    if outputs < OUTPUTS or outputs % 8:
        return f"{outputs} outputs: it needs {OUTPUTS} at least, and a multiple of 8"
    if inputs % _LEAST_INPUTS:
        return f"{inputs} inputs: it needs a multiple of {_LEAST_INPUTS}"
    return None


def why_no_groups(scale_rows: int, *, minima: bool) -> str | None:
    """Why no operand has weights in groups with so many rows of scales, in one line, or None."""
    size = _scale_bytes(scale_rows, minima=minima)
    if size > MOST_SCALE_BYTES:
        return f"{OUTPUTS} outputs have scales of {size} bytes: it has room for {MOST_SCALE_BYTES}"
    return None


def swizzled(width: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """The layout in shared memory of rows of `width` numbers that products, and copies, have."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, width * size)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


class _Dense:
    """[E, outputs, inputs], multiplied as it is."""

    ring_bytes = 96 << 10

    def __init__(self, weight: Shaped[Array, "E outputs inputs"]):
        _, self.outputs, self.inputs = weight.shape
        self.room, self.dtype, size = self.outputs, weight.dtype, weight.dtype.itemsize
        self.chunk = next(n // size for n in _CHUNK_BYTES if self.inputs * size % n == 0)
        self.chunk_bytes = size * OUTPUTS * self.chunk
        self.expert_bytes = size * self.outputs * self.inputs

    def scratch(self, slots: int) -> list[Any]:
        shape = slots, OUTPUTS, self.chunk
        return [plgpu.SMEM(shape, self.dtype, transforms=swizzled(self.chunk, self.dtype))]

    def begin(self, block: GridBlock) -> None:
        pass

    def fetch(self, block: GridBlock, index: Any, slot: Any, arrived: Ref) -> None:
        (weight,), (values,) = block.arrays, block.memory
        columns = pl.ds(index * self.chunk, self.chunk)
        source = weight.at[block.expert, block.part, columns]
        plgpu.copy_gmem_to_smem(source, values.at[slot], arrived)

    def wait(self, block: GridBlock) -> None:
        pass

    def pairs(
        self, block: GridBlock, index: Any, slot: Any, rows: Ref
    ) -> Iterator[tuple[Ref | Tile, Ref]]:
        yield block.memory[0].at[slot], rows.transpose((1, 0))


class _Floats(_Dense):
    """bfloat16, in float32 sums."""

    sum_dtype = jnp.float32

    def rows(self, x: Float32[Array, "m inputs"]) -> Rows:
        return Rows([x.astype(jnp.bfloat16)])

    def total(self, sums: Tile) -> Tile:
        return sums


class _Integers(_Dense):
    """int8, in exact sums of one or two digits of rows; those of outputs get their scales later."""

    sum_dtype = jnp.int32

    def __init__(self, weight: Quantized):
        super().__init__(weight.values)
        self.single = isinstance(weight, W8A8)

    def rows(self, x: Float32[Array, "m inputs"]) -> Rows:
        high, low, scales = digits(x, single=self.single)
        return Rows([high] if low is None else [high, low], scales)

    def total(self, sums: Tile) -> Tile:
        units = sums.astype(jnp.float32)
        if self.single:
            return units
        block = units.shape[1] // 2
        high = lax.slice(units, (0, 0), (OUTPUTS, block))
        low = lax.slice(units, (0, block), (OUTPUTS, 2 * block))
        return high + low / DIGIT


class _Groups:
    """Numbers in groups of inputs, by blocks of `BLOCK` inputs.

    Shared memory has slots of numbers, and scales and perhaps minima of all inputs.
    """

    ring_bytes = 48 << 10  # less than of dense ones, so that more blocks of the grid share a core
    sum_dtype = jnp.float32

    def __init__(self, weight: ExpertGroups, inputs: int, *, interpret: bool):
        values, *factors = jax.tree.leaves(weight)
        self.group, self.is_e2m1 = weight.group, weight.has_exponents
        self.has_minima, self.interpret = weight.minima is not None, interpret
        self.dtype, self.outputs, self.room = values.dtype, weight.outputs, values.shape[-1]
        self.factors = [(array.shape[1], array.dtype) for array in factors]
        blocks = pl.cdiv(inputs, BLOCK)
        self.inputs = blocks * BLOCK
        self.blocks = next(count for count in _BLOCKS if blocks % count == 0)
        self.chunk = self.blocks * BLOCK
        self.block_rows = LEAST_GROUP if weight.has_words else BLOCK
        self.chunk_rows = self.blocks * self.block_rows
        self.chunk_bytes = self.chunk_rows * OUTPUTS * self.dtype.itemsize
        columns = pl.cdiv(weight.outputs, OUTPUTS) * OUTPUTS
        arrays = (values, *factors)
        self.expert_bytes = sum(part.shape[1] * columns * part.dtype.itemsize for part in arrays)

    def rows(self, x: Float32[Array, "m inputs"]) -> Rows:
        beyond = (0, 0), (0, self.inputs - x.shape[1])
        return Rows([jnp.pad(x.astype(jnp.bfloat16), beyond)])

    def total(self, sums: Tile) -> Tile:
        return sums

    def scratch(self, slots: int) -> list[Any]:
        shape = slots, self.chunk_rows, OUTPUTS
        dense = plgpu.SMEM((OUTPUTS, BLOCK), jnp.bfloat16, transforms=swizzled(BLOCK))
        return [
            plgpu.Barrier(num_arrivals=sum(len(_copied(rows)) for rows, _ in self.factors)),
            plgpu.SMEM(shape, self.dtype, transforms=swizzled(OUTPUTS, self.dtype)),
            *(plgpu.SMEM((rows, OUTPUTS), dtype) for rows, dtype in self.factors),
            *([dense] if self.interpret else []),
        ]

    def begin(self, block: GridBlock) -> None:
        (arrived, _, *shared), (_, *factors) = block.memory, block.arrays
        for array, target in zip(factors, shared, strict=False):
            for rows in _copied(array.shape[1]):
                source = array.at[block.expert, rows, block.part]
                plgpu.copy_gmem_to_smem(source, target.at[rows], arrived)

    def fetch(self, block: GridBlock, index: Any, slot: Any, arrived: Ref) -> None:
        rows = pl.ds(pl.multiple_of(index * self.chunk_rows, 8), self.chunk_rows)
        source = block.arrays[0].at[block.expert, rows, block.part]
        plgpu.copy_gmem_to_smem(source, block.memory[1].at[slot], arrived)

    def wait(self, block: GridBlock) -> None:
        plgpu.barrier_wait(block.memory[0])

    def pairs(
        self, block: GridBlock, index: Any, slot: Any, rows: Ref
    ) -> Iterator[tuple[Ref | Tile, Ref]]:
        _, values, scales, *others = block.memory
        minima = others[0] if self.has_minima else None
        for place in range(self.blocks):
            stored = values.at[slot, pl.ds(place * self.block_rows, self.block_rows)]
            tile = self._values(stored, scales, minima, index * self.blocks + place)
            if self.interpret:  # JAX interprets no operand in registers
                dense = others[-1]
                dense[...] = tile
                plgpu.commit_smem()
                tile = dense
            yield tile, rows.at[:, pl.ds(place * BLOCK, BLOCK)].transpose((1, 0))

    def _values(self, stored: Ref, scales: Ref, minima: Ref | None, block: jax.Array) -> Tile:
        """The values [OUTPUTS, BLOCK] of a block."""
        of_groups = partial(_by_groups, group=self.group, block=block)
        scale_of = of_groups(partial(_exponents if self.is_e2m1 else _factors, scales))
        minimum_of = None if minima is None else of_groups(partial(_factors, minima))
        parts = []
        for place, number in enumerate(_numbers(stored, is_e2m1=self.is_e2m1)):
            scale = scale_of[place]
            value = scaled_bits(number, scale) if self.is_e2m1 else number * scale
            value = value if minimum_of is None else value + minimum_of[place]
            parts.append(value.astype(jnp.bfloat16))
        return jnp.concatenate(parts, axis=1)


def _copied(rows: int) -> list[Any]:
    """The rows of each copy of so many."""
    return [pl.ds(start, min(_COPIED_ROWS, rows - start)) for start in range(0, rows, _COPIED_ROWS)]


def _numbers(stored: Ref, *, is_e2m1: bool) -> list[Tile]:
    """The numbers [OUTPUTS, LEAST_GROUP] at each place of a block's words, or of its rows."""
    transposed = _load(stored.transpose((1, 0)), layout=plgpu.Layout.WGMMA_TRANSPOSED)
    if stored.dtype == jnp.int32:
        words = plgpu.layout_cast(transposed, plgpu.Layout.WGMMA)
        return [numbers(words, place, is_e2m1=is_e2m1) for place in range(8)]
    if stored.dtype != jnp.int8:  # from floats of 8 bits there is no shorter way
        transposed = transposed.astype(jnp.float32)
    values = plgpu.layout_cast(transposed.astype(jnp.bfloat16), plgpu.Layout.WGMMA)
    return [
        lax.slice(values, (0, start), (OUTPUTS, start + LEAST_GROUP)).astype(jnp.float32)
        for start in range(0, BLOCK, LEAST_GROUP)
    ]


def _by_groups(factor: Callable[[jax.Array], Tile], *, group: int, block: jax.Array) -> list[Tile]:
    """What each eight inputs of a block have of their group's, for each of their outputs."""
    if group >= BLOCK:
        return [factor(lax.div(block, group // BLOCK))] * 8
    count = BLOCK // group
    of_groups = [factor(block * count + place) for place in range(count)]
    return [of_groups[place * count // 8] for place in range(8)]


def _factors(array: Ref, group: jax.Array) -> Tile:
    """Scales or minima of a group, beside eight inputs."""
    return _beside_inputs(_load(array.at[group], layout=_ROW))


def _exponents(words: Ref, group: jax.Array) -> Tile:
    """`exponent_bits` of a group, beside eight inputs."""
    rows = words.shape[0]
    word = _load(words.at[lax.rem(group, rows)], layout=_ROW)
    return _beside_inputs(exponent_bits(word, lax.div(group, rows)))


def _beside_inputs(of_outputs: Shaped[Array, "outputs"]) -> Shaped[Array, "outputs _"]:
    return lax.broadcast_in_dim(of_outputs, (OUTPUTS, LEAST_GROUP), (0,))


def _scale_bytes(scale_rows: int, *, minima: bool) -> int:
    return 4 * OUTPUTS * scale_rows * (2 if minima else 1)
