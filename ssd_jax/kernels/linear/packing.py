"""Packs weights into panels, as `kinds` specifies."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, UInt8

from ssd_jax.kernels.linear.kinds import BFLOAT16, INT8, LANES, Kind

_BYTES_AT_A_TIME = 1 << 19
"""Bytes packed at a time, so that intermediate values stay in a core's cache."""

Stored = UInt8[np.ndarray, "panels lanes blocks block_bytes"]
"""ggml's blocks, of whole panels or of a part of one."""
Lanes = np.ndarray
"""A part of a stream: [panels, blocks, steps, lanes], with one, two or four bytes an entry."""


def pack_blocks(
    kind: Kind,
    blocks: UInt8[np.ndarray, "outputs row_bytes"],
    panels: UInt8[np.ndarray, "panels panel_bytes"] | None = None,
) -> UInt8[np.ndarray, "panels panel_bytes"]:
    """Packs a weight as files store it (see `Kind.stored_bytes`): a row of blocks for each output.

    Args:
      kind: one of `STORED_KINDS`.
      panels: zeros that become the panels; None makes an array.
    """
    outputs, row_bytes = blocks.shape
    inputs = row_bytes // kind.stored_bytes * kind.block
    stored = blocks.reshape(outputs, -1, kind.stored_bytes)
    if panels is None:
        panels = np.zeros(kind.packed_shape(outputs, inputs), np.uint8)
    streams = panels.reshape(len(panels), -1, kind.block_bytes)
    panels_at_a_time = max(1, _BYTES_AT_A_TIME // panels.shape[1])
    full_panels = outputs // LANES
    for start in range(0, full_panels, panels_at_a_time):
        stop = min(start + panels_at_a_time, full_panels)
        lanes = stored[start * LANES : stop * LANES]
        lanes = lanes.reshape(stop - start, LANES, *stored.shape[1:])
        _write_fields(streams[start:stop], _FIELDS_BY_KIND[kind.name](lanes))
    if outputs % LANES:
        _write_fields(
            streams[full_panels:], _FIELDS_BY_KIND[kind.name](stored[None, full_panels * LANES :])
        )
    return panels


def pack_bfloat16(
    weight: Float[Array, "*experts outputs inputs"],
) -> UInt8[Array, "panels panel_bytes"]:
    """Packs a weight rounded to bfloat16; those of several experts one after the other."""
    *experts, outputs, inputs = weight.shape
    padding = (0, -outputs % LANES), (0, BFLOAT16.padded_inputs(inputs) - inputs)
    padding = (*((0, 0),) * len(experts), *padding)
    return _lanes_last(jnp.pad(weight.astype(jnp.bfloat16), padding), BFLOAT16)


def pack_int8(
    values: Int8[Array, "*experts outputs inputs"], scales: Float32[Array, "*experts outputs"]
) -> UInt8[Array, "panels panel_bytes"]:
    """Packs an int8 weight, whose row i is values[i] * scales[i]; those of several experts one
    after the other."""
    *experts, outputs, inputs = values.shape
    unsigned = jax.lax.bitcast_convert_type(values, jnp.uint8) ^ INT8.offset
    unpadded = ((0, 0),) * len(experts)
    padding = *unpadded, (0, 0), (0, INT8.padded_inputs(inputs) - inputs)
    unsigned = jnp.pad(unsigned, padding, constant_values=INT8.offset)
    rows = *unpadded, (0, -outputs % LANES)
    tail = jax.lax.bitcast_convert_type(jnp.pad(scales, rows), jnp.uint8)
    words = _lanes_last(jnp.pad(unsigned, (*rows, (0, 0))), INT8)
    return jnp.concatenate([words, tail.reshape(-1, INT8.tail_bytes)], axis=1)


def _lanes_last(weight: Array, kind: Kind) -> UInt8[Array, "panels blocks_bytes"]:
    """Each panel's words, step by step, as bytes; outputs and inputs are padded."""
    words = weight.reshape(-1, LANES, weight.shape[-1] // kind.per_word, kind.per_word)
    words = words.swapaxes(1, 2)
    stream = words if words.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(words, jnp.uint8)
    return stream.reshape(len(words), -1)


def _write_fields(
    streams: UInt8[np.ndarray, "panels blocks block_bytes"], fields: list[Lanes]
) -> None:
    """Writes the parts of a block one after the other; lanes missing in a part stay zero."""
    offset = 0
    for field in fields:
        size = field.shape[2] * LANES * field.itemsize
        target = streams[..., offset : offset + size].view(field.dtype)
        target.reshape(*field.shape[:3], LANES)[..., : field.shape[3]] = field
        offset += size


def _split_fields(stored: Stored, *layout: tuple[str, int]) -> list[Lanes]:
    """The fields of a block in ggml's order, each a number of entries of a NumPy dtype."""
    fields, offset = [], 0
    for dtype, count in layout:
        size = count * np.dtype(dtype).itemsize
        field = np.ascontiguousarray(stored[..., offset : offset + size]).view(dtype)
        fields.append(field.transpose(0, 2, 3, 1))
        offset += size
    return fields


def _q4(stored: Stored, scales: int) -> list[Lanes]:
    """Q4_0 and Q4_1: `scales` is 2 where a minimum follows the scale."""
    scale, nibbles = _split_fields(stored, ("<u2", scales), ("<u4", 4))
    return [nibbles, scale]


def _q5(stored: Stored, scales: int) -> list[Lanes]:
    """Q5_0 and Q5_1, likewise."""
    scale, high, nibbles = _split_fields(stored, ("<u2", scales), ("<u4", 1), ("<u4", 4))
    return [nibbles, _fifth_bits(high), scale]


def _fifth_bits(high: Lanes) -> Lanes:
    """The word of high bits of 32 inputs, from one in which bit j belongs to input j."""
    spread = (  # bit i of a step goes to byte i, in which each step has its own bit
        (((high >> np.uint32(4 * i)) & np.uint32(0xF)) * np.uint32(0x204081))
        & np.uint32(0x01010101)
        for i in range(8)
    )
    return _pack_high_bits(list(spread), 1)


def _pack_high_bits(steps: list[Lanes], bits: int) -> Lanes:
    """One word from the high bits of several steps, of which each byte has `bits`."""
    return functools.reduce(
        np.bitwise_or, (step << np.uint32(bits * i) for i, step in enumerate(steps))
    )


def _q8_0(stored: Stored) -> list[Lanes]:
    scale, values = _split_fields(stored, ("<u2", 1), ("<u4", 8))
    return [values ^ np.uint32(0x80808080), scale]  # value + 128 in every byte


def _f8_e4m3(stored: Stored) -> list[Lanes]:
    scale, floats = _split_fields(stored, ("<u4", 1), ("<u4", 32))
    outer, inner = floats & np.uint32(0xFF0000FF), floats & np.uint32(0x00FFFF00)
    inner = (inner << np.uint32(8) & np.uint32(0x00FF0000)) | (inner >> np.uint32(8))
    return [outer | (inner & np.uint32(0x00FFFF00)), scale]  # bytes 0, 2, 1, 3


def _q4_k(stored: Stored, high_words: int = 0) -> list[Lanes]:
    """Q4_K; Q5_K with 8 words of fifth bits, in which bit j of a byte belongs to group j."""
    d, scales, high, nibbles = _split_fields(
        stored, ("<u2", 2), ("<u4", 3), ("<u4", high_words), ("<u4", 32)
    )
    fields: list[Lanes] = [d]
    six_bit_words = _six_bits(_with_contiguous_steps(scales))
    high = _with_contiguous_steps(high)
    nibbles = _with_contiguous_steps(nibbles)
    for group in range(8):
        start = 8 * (group // 2)  # two groups share 32 bytes: halves of the same bytes
        first_half = _nibbles(nibbles[:, :, start : start + 4], group % 2)
        second = _nibbles(nibbles[:, :, start + 4 : start + 8], group % 2)
        fields.append(first_half | (second << np.uint32(4)))
        if high_words:
            bits = (high >> np.uint32(group)) & np.uint32(0x01010101)
            fields.append(_pack_high_bits([bits[:, :, i : i + 1] for i in range(high_words)], 1))
        for words in six_bit_words:
            fields.append((words[group // 4] >> np.uint32(8 * (group % 4))).astype(np.uint8))
    return fields


def _six_bits(scales: Lanes) -> tuple[tuple[Lanes, Lanes], tuple[Lanes, Lanes]]:
    """Scales and minima of groups 0 to 3 and 4 to 7, a byte each, from Q4_K's 12 bytes."""
    scale, minimum, high_bits = (scales[:, :, index : index + 1] for index in range(3))
    high_mask = np.uint32(0x30303030)
    two, low_mask = np.uint32(2), np.uint32(0x3F3F3F3F)
    later_scale = _nibbles(high_bits, 0) | ((scale >> two) & high_mask)
    later_minimum = _nibbles(high_bits, 1) | ((minimum >> two) & high_mask)
    return (scale & low_mask, later_scale), (minimum & low_mask, later_minimum)


def _q6_k(stored: Stored) -> list[Lanes]:
    low, high, scales, d = _split_fields(stored, ("<u4", 32), ("<u4", 16), ("u1", 16), ("<u2", 1))
    low, high, fields = _with_contiguous_steps(low), _with_contiguous_steps(high), [d]
    for group in range(16):
        half, quarter, step = group // 8, group // 2 % 4, 4 * (group % 2)
        start = 16 * half + 8 * (quarter % 2) + step
        nibbles = _nibbles(low[:, :, start : start + 4], quarter // 2)
        start = 8 * half + step
        bits = (high[:, :, start : start + 4] >> np.uint32(2 * quarter)) & np.uint32(0x03030303)
        fields.append(nibbles[:, :, :2] | (nibbles[:, :, 2:] << np.uint32(4)))
        fields.append(_pack_high_bits([bits[:, :, i : i + 1] for i in range(4)], 2))
        fields.append(scales[:, :, group : group + 1])
    return fields


def _mxfp4(stored: Stored) -> list[Lanes]:
    exponent, nibbles = _split_fields(stored, ("u1", 1), ("<u4", 4))
    return [nibbles, exponent]


def _with_contiguous_steps(steps: Lanes) -> Lanes:
    """A copy with each step contiguous in memory, so that arithmetic on a few steps is fast."""
    return np.ascontiguousarray(steps.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)


def _nibbles(words: Lanes, half: int) -> Lanes:
    """The low (0) or high (1) halves of every byte, as bytes."""
    return (words >> np.uint32(4 * half)) & np.uint32(0x0F0F0F0F)


_FIELDS_BY_KIND: dict[str, Callable[[Stored], list[Lanes]]] = {
    "F8_E4M3": _f8_e4m3,
    "Q4_0": functools.partial(_q4, scales=1),
    "Q4_1": functools.partial(_q4, scales=2),
    "Q5_0": functools.partial(_q5, scales=1),
    "Q5_1": functools.partial(_q5, scales=2),
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": functools.partial(_q4_k, high_words=8),
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
"""Functions from stored blocks to the parts of a panel's block, in the stream's order."""
