"""Random rows of ggml's blocks."""

from __future__ import annotations

import gguf
import numpy as np

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
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        half = rng.normal(size=(rows, inputs // block, 1)).astype(np.float16)
        blocks[..., at : at + 2] = half.view(np.uint8)
    if kind == "MXFP4":  # exponents, of which any bits span more than float32 does
        blocks[..., 0] = rng.integers(112, 142, blocks.shape[:2])
    return blocks.reshape(rows, -1)
