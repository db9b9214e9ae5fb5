"""MXFP4, as gpt-oss has it: floats of four bits, of which 32 inputs share an exponent."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, UInt8
from typing_extensions import override

from ssd_jax.checkpoints.quantized.scheme import Scheme, Shape, StoredTensors
from ssd_jax.checkpoints.weights.grouped import StoredGroups, float4_groups
from ssd_jax.checkpoints.weights.tensors import Index
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.kinds import E2M1

_BLOCK = 32
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
"""The low halves of eight bytes."""
_EXCESS = 127
_NOT_A_NUMBER = 255
"""Of an exponent."""


class Mxfp4(Scheme):
    """`_blocks` uint8 [experts, outputs, blocks, 16], the first of a byte's inputs in its low half;
    `_scales` uint8 [experts, outputs, blocks], exponents of 2, plus 127."""

    name = "MXFP4"
    main = "blocks"
    needed = (("scales",),)
    separator = "_"

    @override
    def shape(self, stored: StoredTensors, module: str) -> Shape:
        *outer, size = stored.shapes[f"{module}_blocks"]
        scales = stored.shapes[f"{module}_scales"]
        if (*outer,) != scales or size != _BLOCK // 2:
            raise ValueError(f"scales {[*scales]} beside blocks {[*outer, size]}")
        return (*scales[:-1], scales[-1] * _BLOCK)

    @override
    def read_part(
        self, stored: StoredTensors, module: str, part: Index
    ) -> Float32[np.ndarray, "*outputs columns"]:
        *outer, columns = part
        first = columns.start // _BLOCK
        blocks = slice(first, max(first, -(-columns.stop // _BLOCK)))
        codes, exponents = _read(stored, module, (*outer, blocks))
        floats = np.asarray(E2M1, np.float32)[codes]
        values = np.ldexp(floats, exponents.astype(np.int32)[..., None] - _EXCESS)
        values = values.reshape(*values.shape[:-2], values.shape[-2] * _BLOCK)
        skipped = first * _BLOCK
        return values[..., columns.start - skipped : columns.stop - skipped]

    @override
    def group_form(self, stored: StoredTensors, module: str) -> GroupForm | None:
        return GroupForm(FLOAT4, _BLOCK) if len(self.shape(stored, module)) == 3 else None

    @override
    def read_expert_groups(
        self, stored: StoredTensors, module: str, expert: int, rows: slice
    ) -> StoredGroups:
        *_, blocks = stored.shapes[f"{module}_scales"]
        part = slice(expert, expert + 1), slice(rows.start, rows.stop), slice(0, blocks)
        codes, exponents = _read(stored, module, part, rows.step or 1)
        return float4_groups(codes[0], exponents[0])

    @override
    def kind(self, stored: StoredTensors, module: str) -> str:
        return self.name

    @override
    def read_blocks(
        self, stored: StoredTensors, module: str
    ) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        shape = stored.shapes[f"{module}_scales"]
        return _read_blocks(stored, module, tuple(slice(0, size) for size in shape))

    @override
    def read_expert_blocks(
        self, stored: StoredTensors, module: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        *_, blocks = stored.shapes[f"{module}_scales"]
        part = slice(expert, expert + 1), slice(rows.start, rows.stop), slice(0, blocks)
        return _read_blocks(stored, module, part, rows.step or 1)[0]


def _read_blocks(
    stored: StoredTensors, module: str, part: Index, step: int = 1
) -> UInt8[np.ndarray, "*outputs row_bytes"]:
    """ggml's blocks of a part, of every so many rows: an exponent, then bytes that have inputs j
    and j + 16 where the file's have 2j and 2j + 1."""
    pairs, exponents = _read_pairs(stored, module, part, step)
    found = np.empty((*exponents.shape, 1 + _BLOCK // 2), np.uint8)
    found[..., 0] = exponents
    words = np.ascontiguousarray(pairs).view(np.uint64)  # eight bytes at a time
    first, last, four = words[..., :1], words[..., 1:], np.uint64(4)
    found[..., 1::2] = ((first & _LOW) | ((last & _LOW) << four)).view(np.uint8)
    found[..., 2::2] = (((first >> four) & _LOW) | (last & ~_LOW)).view(np.uint8)
    return found.reshape(*exponents.shape[:-1], -1)


def _read(
    stored: StoredTensors, module: str, part: Index, step: int = 1
) -> tuple[UInt8[np.ndarray, "*blocks 32"], UInt8[np.ndarray, "*blocks"]]:
    """The floats' bits and the exponents of some blocks, of every so many rows."""
    pairs, exponents = _read_pairs(stored, module, part, step)
    codes = np.stack([pairs & np.uint8(0xF), pairs >> np.uint8(4)], axis=-1)
    return codes.reshape(*pairs.shape[:-1], _BLOCK), exponents


def _read_pairs(
    stored: StoredTensors, module: str, part: Index, step: int
) -> tuple[UInt8[np.ndarray, "*blocks 16"], UInt8[np.ndarray, "*blocks"]]:
    """The bytes, of two floats each, and the exponents of some blocks, of every so many rows."""
    pairs = stored.read_stored(f"{module}_blocks", (*part, slice(0, _BLOCK // 2)))[
        ..., ::step, :, :
    ]
    exponents = stored.read_stored(f"{module}_scales", part)[..., ::step, :]
    if (exponents == _NOT_A_NUMBER).any():
        raise ValueError("a scale is not a number")
    return pairs, exponents
