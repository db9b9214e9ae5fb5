"""Tiny checkpoints of gpt-oss as it is published, in MXFP4, and in floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ssd_jax.kernels.linear.kinds import E2M1
from ssd_jax.testing import tiny

EXPERTS, HIDDEN, CHANNELS = 4, 32, 64
CONFIG = tiny.config(
    "gpt_oss",
    attention_bias=True,
    hidden_size=HIDDEN,
    intermediate_size=CHANNELS,
    num_experts_per_tok=2,
    num_local_experts=EXPERTS,
    sliding_window=8,
)
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def published(seed: int = 1) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors in MXFP4, and the same values as floats, by the names of each kind of file."""
    rng = np.random.default_rng(seed)
    others = {n: v for n, v in tiny.weights(CONFIG).items() if ".mlp.experts." not in n}
    quantised, floats = dict(others), dict(others)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, rows, columns in (
            ("gate_up_proj", 2 * CHANNELS, HIDDEN),
            ("down_proj", HIDDEN, CHANNELS),
        ):
            codes = rng.integers(0, 16, (EXPERTS, rows, columns // 32, 16, 2), np.uint8)
            scales = rng.integers(123, 126, codes.shape[:3], np.uint8)
            values = np.asarray(E2M1, np.float32)[codes].reshape(*codes.shape[:3], 32)
            values = (values * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(
                EXPERTS, rows, columns
            )
            quantised[f"{prefix}{name}_blocks"] = codes[..., 0] | codes[..., 1] << 4
            quantised[f"{prefix}{name}_scales"] = scales
            turned = values.swapaxes(1, 2).astype(ml_dtypes.bfloat16)
            floats[f"{prefix}{name}"] = np.ascontiguousarray(turned)
            bias = rng.normal(size=(EXPERTS, rows)).astype(ml_dtypes.bfloat16)
            quantised[f"{prefix}{name}_bias"] = floats[f"{prefix}{name}_bias"] = bias
    return quantised, floats


def write(directory: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    """Writes a checkpoint; returns its directory."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, directory / "model.safetensors")
    tiny.write_tokenizer(directory)
    return directory
