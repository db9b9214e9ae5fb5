"""Sampling settings that a checkpoint recommends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.system.files import read_json

FILE = "generation_config.json"
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def read_sampling(checkpoint: Checkpoint) -> tuple[Path, dict[str, Any]]:
    """The file with the settings, and the settings: fields of `SamplingParams` by name, unchecked.

    A directory has `generation_config.json`, where `do_sample` counts as in `transformers`: false
    is greedy, true without a temperature is a temperature of 1. GGUF has keys `general.sampling.*`,
    as llama.cpp's converter writes them.

    Raises:
      InputError: the file cannot be read.
    """
    path = checkpoint.path
    if isinstance(checkpoint.tensors, GGUFFile):
        settings = _gguf_settings(checkpoint.tensors.metadata)
    else:
        path = path / FILE
        settings = read_json(path) if path.exists() else {}
    sampling = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
    if settings.get("do_sample") is False:
        sampling["temperature"] = 0.0
    elif settings.get("do_sample") is True:
        sampling = {"temperature": 1.0} | sampling
    return path, sampling


def _gguf_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        name: metadata.get(f"general.sampling.{_GGUF_NAMES.get(name, name)}") for name in _SETTINGS
    }
    # Floats have 32 bits there: 0.7 was meant, not 0.699999988.
    return {
        name: float(str(np.float32(value))) if isinstance(value, float) else value
        for name, value in settings.items()
    }
