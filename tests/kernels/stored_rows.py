"""Random rows of blocks as files store them."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np

from ssd_jax.kernels.linear.kinds import FLOAT8

_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block's float16 numbers are: random bits there would include infinities."""


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Any bits that a file could have, uint8 [rows, row_bytes]."""
    rng = np.random.default_rng(seed)
    if kind == FLOAT8.name:
        shape = rows, inputs // FLOAT8.block, FLOAT8.block
        scales = rng.normal(size=(*shape[:2], 1)) / 64
        scales = scales.astype(np.float32).view(np.uint8)
        floats = rng.integers(0, 127, shape) + rng.choice([0, 128], shape)
        return np.concatenate([scales, floats.astype(np.uint8)], axis=-1).reshape(rows, -1)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        half = rng.normal(size=(rows, inputs // block, 1)).astype(np.float16)
        blocks[..., at : at + 2] = half.view(np.uint8)
    if kind == "MXFP4":  # exponents, of which any bits span more than float32 does
        blocks[..., 0] = rng.integers(112, 142, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def dequantized(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The values of rows of blocks, float32 [rows, inputs]."""
    if kind != FLOAT8.name:
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    stored = blocks.reshape(len(blocks), -1, FLOAT8.stored_bytes)
    floats = np.ascontiguousarray(stored[..., 4:]).view(ml_dtypes.float8_e4m3fn)
    scales = np.ascontiguousarray(stored[..., :4]).view(np.float32)
    return (floats.astype(np.float32) * scales).reshape(len(blocks), -1)
