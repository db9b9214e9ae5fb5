"""Writes checkpoints whose matrices are 8-bit floats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

_DTYPES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float32": "F32",
}


def write_float8(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `model.safetensors`; safetensors itself takes no 8-bit floats of NumPy."""
    header, data = {}, b""
    for name, array in arrays.items():
        begin, data = len(data), data + array.tobytes()
        kind, shape = _DTYPES[array.dtype.name], [*array.shape]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    length = len(text).to_bytes(8, "little")
    (directory / "model.safetensors").write_bytes(length + text + data)


def quantise_float8(directory: Path, block: tuple[int, int]) -> None:
    """Rounds the matrices of a checkpoint's layers to 8-bit floats with scales of blocks."""
    stored = {}
    for name, array in load_file(directory / "model.safetensors").items():
        stored[name] = array
        if ".layers." not in name or array.ndim != 2:
            continue
        rows, columns = (-(-size // part) for size, part in zip(array.shape, block, strict=True))
        padded = np.zeros((rows * block[0], columns * block[1]), np.float32)
        padded[: array.shape[0], : array.shape[1]] = array.astype(np.float32)
        tiles = padded.reshape(rows, block[0], columns, block[1])
        scales = np.maximum(np.abs(tiles).max((1, 3), keepdims=True), 1e-3) / 448
        floats = (tiles / scales).reshape(padded.shape)[: array.shape[0], : array.shape[1]]
        stored[name] = floats.astype(ml_dtypes.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].astype(np.float32)
    write_float8(directory, stored)
    path = directory / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [*block]}
    settings = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(settings))
