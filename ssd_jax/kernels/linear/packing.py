"""Packs weights into panels, as `kinds` specifies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, UInt8

from ssd_jax.kernels.linear.kinds import BFLOAT16, INT8, LANES, Kind

_PIECE = 1 << 19
"""Bytes packed at a time, so that intermediate values stay in a core's cache."""

Stored = UInt8[np.ndarray, "panels lanes blocks block_bytes"]
"""ggml's blocks, of whole panels or of a part of one."""
Lanes = np.ndarray
"""A part of a stream: [panels, blocks, steps, lanes], with one, two or four bytes an entry."""


def pack_blocks(
    kind: Kind, blocks: UInt8[np.ndarray, "outputs row_bytes"]
) -> UInt8[np.ndarray, "panels panel_bytes"]:
    """Packs a weight as ggml stores it: a row of blocks for each output.

    Args:
      kind: one of `STORED_KINDS`.
    """
    outputs, row_bytes = blocks.shape
    inputs = row_bytes // kind.stored_bytes * kind.block
    stored = blocks.reshape(outputs, -1, kind.stored_bytes)
    panels = np.zeros(kind.packed_shape(outputs, inputs), np.uint8)
    streams = panels.reshape(len(panels), -1, kind.block_bytes)
    step = max(1, _PIECE // panels.shape[1])
    whole = outputs // LANES
    for first in range(0, whole, step):
        last = min(first + step, whole)
        piece = stored[first * LANES : last * LANES]
        piece = piece.reshape(last - first, LANES, *stored.shape[1:])
        _write(streams[first:last], _PARTS[kind.name](piece))
    if outputs % LANES:
        _write(streams[whole:], _PARTS[kind.name](stored[None, whole * LANES :]))
    return panels


def pack_bfloat16(weight: Float[Array, "outputs inputs"]) -> UInt8[Array, "panels panel_bytes"]:
    """Packs a weight rounded to bfloat16."""
    outputs, inputs = weight.shape
    padding = (0, -outputs % LANES), (0, BFLOAT16.padded(inputs) - inputs)
    return _lanes_last(jnp.pad(weight.astype(jnp.bfloat16), padding), BFLOAT16)


def pack_int8(
    values: Int8[Array, "outputs inputs"], scales: Float32[Array, "outputs"]
) -> UInt8[Array, "panels panel_bytes"]:
    """Packs an int8 weight, whose row i is values[i] * scales[i]."""
    outputs, inputs = values.shape
    unsigned = jax.lax.bitcast_convert_type(values, jnp.uint8) ^ INT8.offset
    padding = (0, 0), (0, INT8.padded(inputs) - inputs)
    unsigned = jnp.pad(unsigned, padding, constant_values=INT8.offset)
    rows = 0, -outputs % LANES
    tail = jax.lax.bitcast_convert_type(jnp.pad(scales, rows), jnp.uint8)
    words = _lanes_last(jnp.pad(unsigned, (rows, (0, 0))), INT8)
    return jnp.concatenate([words, tail.reshape(-1, INT8.tail_bytes)], axis=1)


def _lanes_last(weight: Array, kind: Kind) -> UInt8[Array, "panels blocks_bytes"]:
    """Each panel's words, step by step, as bytes; `weight` is [outputs, inputs], both padded."""
    words = weight.reshape(-1, LANES, weight.shape[1] // kind.per_word, kind.per_word)
    words = words.swapaxes(1, 2)
    stream = words if words.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(words, jnp.uint8)
    return stream.reshape(len(words), -1)


def _write(streams: UInt8[np.ndarray, "panels blocks block_bytes"], parts: list[Lanes]) -> None:
    """Writes the parts of a block one after the other; lanes missing in a part stay zero."""
    at = 0
    for part in parts:
        size = part.shape[2] * LANES * part.itemsize
        target = streams[..., at : at + size].view(part.dtype)
        target.reshape(*part.shape[:3], LANES)[..., : part.shape[3]] = part
        at += size


def _split(stored: Stored, *fields: tuple[str, int]) -> list[Lanes]:
    """The fields of a block in ggml's order, each a number of entries of a NumPy dtype."""
    parts, at = [], 0
    for dtype, count in fields:
        size = count * np.dtype(dtype).itemsize
        field = np.ascontiguousarray(stored[..., at : at + size]).view(dtype)
        parts.append(field.transpose(0, 2, 3, 1))
        at += size
    return parts


def _q4(stored: Stored, scales: int) -> list[Lanes]:
    """With a scale, or with a scale followed by a minimum."""
    scale, nibbles = _split(stored, ("<u2", scales), ("<u4", 4))
    return [nibbles, scale]


def _q5(stored: Stored, scales: int) -> list[Lanes]:
    """As `_q4`."""
    scale, high, nibbles = _split(stored, ("<u2", scales), ("<u4", 1), ("<u4", 4))
    return [nibbles, _fifth_bits(high), scale]


def _fifth_bits(high: Lanes) -> Lanes:
    """The word of bits above 32 nibbles, from one in which bit j belongs to input j."""
    spread = (  # bit i of a step goes to byte i, in which each step has its own bit
        (((high >> np.uint32(4 * i)) & np.uint32(0xF)) * np.uint32(0x204081))
        & np.uint32(0x01010101)
        for i in range(8)
    )
    return _above(list(spread), 1)


def _above(steps: list[Lanes], bits: int) -> Lanes:
    """The word of the bits above the nibbles of steps: `bits` bits of each byte."""
    return functools.reduce(
        np.bitwise_or, (step << np.uint32(bits * i) for i, step in enumerate(steps))
    )


def _q8_0(stored: Stored) -> list[Lanes]:
    scale, values = _split(stored, ("<u2", 1), ("<u4", 8))
    return [values ^ np.uint32(0x80808080), scale]


def _q4_k(stored: Stored, fifth: int = 0) -> list[Lanes]:
    """With 8 words of fifth bits, or none; bit j of a byte belongs to group j."""
    d, scales, high, nibbles = _split(stored, ("<u2", 2), ("<u4", 3), ("<u4", fifth), ("<u4", 32))
    parts: list[Lanes] = [d]
    sixes, high, nibbles = _six_bits(_apart(scales)), _apart(high), _apart(nibbles)
    for group in range(8):
        first = 8 * (group // 2)  # two groups share 32 bytes: halves of the same bytes
        low = _nibbles(nibbles[:, :, first : first + 4], group % 2)
        upper = _nibbles(nibbles[:, :, first + 4 : first + 8], group % 2)
        parts.append(low | (upper << np.uint32(4)))
        if fifth:
            bits = (high >> np.uint32(group)) & np.uint32(0x01010101)
            parts.append(_above([bits[:, :, i : i + 1] for i in range(fifth)], 1))
        for words in sixes:
            parts.append((words[group // 4] >> np.uint32(8 * (group % 4))).astype(np.uint8))
    return parts


def _six_bits(scales: Lanes) -> tuple[tuple[Lanes, Lanes], tuple[Lanes, Lanes]]:
    """Scales and minima of groups 0 to 3 and 4 to 7, a byte each, from Q4_K's 12 bytes."""
    scale, minimum, rest = (scales[:, :, at : at + 1] for at in range(3))
    top = np.uint32(0x30303030)
    two, six = np.uint32(2), np.uint32(0x3F3F3F3F)
    later_scale = _nibbles(rest, 0) | ((scale >> two) & top)
    later_minimum = _nibbles(rest, 1) | ((minimum >> two) & top)
    return (scale & six, later_scale), (minimum & six, later_minimum)


def _q6_k(stored: Stored) -> list[Lanes]:
    low, high, scales, d = _split(stored, ("<u4", 32), ("<u4", 16), ("u1", 16), ("<u2", 1))
    low, high, parts = _apart(low), _apart(high), [d]
    for group in range(16):
        half, quarter, step = group // 8, group // 2 % 4, 4 * (group % 2)
        first = 16 * half + 8 * (quarter % 2) + step
        nibbles = _nibbles(low[:, :, first : first + 4], quarter // 2)
        first = 8 * half + step
        bits = (high[:, :, first : first + 4] >> np.uint32(2 * quarter)) & np.uint32(0x03030303)
        parts.append(nibbles[:, :, :2] | (nibbles[:, :, 2:] << np.uint32(4)))
        parts.append(_above([bits[:, :, i : i + 1] for i in range(4)], 2))
        parts.append(scales[:, :, group : group + 1])
    return parts


def _apart(steps: Lanes) -> Lanes:
    """A copy with each step contiguous in memory, so that arithmetic on a few steps is fast."""
    return np.ascontiguousarray(steps.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)


def _nibbles(words: Lanes, half: int) -> Lanes:
    """The low (0) or high (1) halves of every byte, as bytes."""
    return (words >> np.uint32(4 * half)) & np.uint32(0x0F0F0F0F)


_PARTS: dict[str, Callable[[Stored], list[Lanes]]] = {
    "Q4_0": functools.partial(_q4, scales=1),
    "Q4_1": functools.partial(_q4, scales=2),
    "Q5_0": functools.partial(_q5, scales=1),
    "Q5_1": functools.partial(_q5, scales=2),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": functools.partial(_q4_k, fifth=8),
    "Q6_K": _q6_k,
}
"""Functions from ggml's blocks to the parts of a panel's block, in the stream's order."""
