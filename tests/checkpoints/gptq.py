"""Quantises a written checkpoint to symmetric GPTQ, and packs integers in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file


def packed(integers: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Integers in words, the first in the lowest bits, spelled out."""
    integers, count = np.moveaxis(integers, axis, -1), 32 // bits
    words = np.zeros((*integers.shape[:-1], integers.shape[-1] // count), np.int64)
    for place in range(integers.shape[-1]):
        shifted = integers[..., place].astype(np.int64) << (bits * (place % count))
        words[..., place // count] |= shifted
    return np.ascontiguousarray(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32))


def quantise(directory: Path, *, group: int = 32, **config: Any) -> dict[str, np.ndarray]:
    """Rounds the matrices of layers to 4 bits.

    Args:
      config: changes to the `quantization_config`.

    Returns: the tensors that the checkpoint has now, as float32.
    """
    floats, stored = {}, {}
    for name, array in load_file(directory / "model.safetensors").items():
        floats[name] = array.astype(np.float32)
        if ".layers." not in name or array.ndim != 2:
            stored[name] = array
            continue
        outputs, inputs = array.shape
        groups = floats[name].T.reshape(-1, group, outputs)
        scales = (np.abs(groups).max(1) / 7).astype(np.float16)
        steps = scales.astype(np.float32)[:, None]
        integers = np.clip(np.rint(groups / steps) + 8, 0, 15).astype(np.uint8)
        floats[name] = ((integers.astype(np.float32) - 8) * steps).reshape(inputs, outputs).T
        module = name.removesuffix(".weight")
        stored[f"{module}.qweight"] = packed(integers.reshape(inputs, outputs), 4, 0)
        stored[f"{module}.qzeros"] = packed(np.full(scales.shape, 7), 4, 1)
        stored[f"{module}.scales"] = scales
    stored = {name: np.ascontiguousarray(array) for name, array in stored.items()}
    save_file(stored, directory / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    path = directory / "config.json"
    settings = json.loads(path.read_text()) | {"quantization_config": quantization | config}
    path.write_text(json.dumps(settings))
    return floats
