"""Quantised matrices in blocks (`Kind.stored_bytes`), so that products read them as they are."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from ssd_jax.checkpoints.quantized.groups import Groups
from ssd_jax.kernels.linear.kinds import FLOAT8

_BLOCK = 32


def kind_of(bits: int, group: int, *, symmetric: bool) -> str | None:
    """The kind that holds groups of this many inputs; None if none does.

    Args:
      symmetric: whether the zero is half of the range in all groups.
    """
    if group % _BLOCK or bits not in (4, 8) or (bits == 8 and not symmetric):
        return None
    return "Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q4_1"


def pack_floats(
    floats: Shaped[np.ndarray, "rows inputs"], scales: Float32[np.ndarray, "rows blocks"]
) -> UInt8[np.ndarray, "rows row_bytes"]:
    """Rows of 8-bit floats in blocks, the last one padded with zeros."""
    rows, inputs = floats.shape
    padding = (0, 0), (0, FLOAT8.padded_inputs(inputs) - inputs)
    blocks = np.pad(floats.view(np.uint8), padding).reshape(rows, -1, FLOAT8.block)
    return np.concatenate([scales[..., None].view(np.uint8), blocks], axis=-1).reshape(rows, -1)


def pack(kind: str | None, groups: Groups) -> UInt8[np.ndarray, "rows row_bytes"]:
    """Rows in blocks. Scales, and the minima of Q4_1, are rounded to float16.

    Raises:
      ValueError: the groups are not those of the kind, or a scale is beyond float16.
    """
    rows, inputs = groups.integers.shape
    first = groups.group_of_input[::_BLOCK]
    scales = groups.scales.astype(np.float32)[:, first]
    zeros = groups.zeros.astype(np.float32)[:, first]
    if kind != "Q4_1" and (zeros != (128 if kind == "Q8_0" else 8)).any():
        raise ValueError("the zeros are not half of the range, as the configuration says")
    fields = [scales] if kind != "Q4_1" else [scales, -zeros * scales]
    halves = np.stack(fields, axis=-1).astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError("a scale is beyond float16")
    blocks = groups.integers.reshape(rows, inputs // _BLOCK, _BLOCK)
    if kind == "Q8_0":
        values: Shaped[np.ndarray, "rows blocks bytes"] = blocks ^ np.uint8(0x80)
    else:
        values = blocks[..., :16] | (blocks[..., 16:] << np.uint8(4))
    return np.concatenate([halves.view(np.uint8), values], axis=-1).reshape(rows, -1)
