"""Sampling settings that a checkpoint recommends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.gguf import GGUFFile
from ssd_jax.system.files import read_json

FILE = "generation_config.json"
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_IN_GGUF = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}


def read_sampling(checkpoint: Checkpoint) -> tuple[Path, dict[str, Any]]:
    """The file with the settings, and the settings: fields of `SamplingParams` by name, unchecked.

    A directory has `generation_config.json`, where `do_sample` counts as in `transformers`: false
    is greedy, true without a temperature is a temperature of 1. GGUF has keys `general.sampling.*`,
    as llama.cpp's converter writes them.

    Raises:
      InputError: the file cannot be read.
    """
    where = checkpoint.path
    if isinstance(checkpoint.tensors, GGUFFile):
        found = _of_gguf(checkpoint.tensors.metadata)
    else:
        where = where / FILE
        found = read_json(where) if where.exists() else {}
    taken = {name: found[name] for name in _SETTINGS if found.get(name) is not None}
    if found.get("do_sample") is False:
        taken["temperature"] = 0.0
    elif found.get("do_sample") is True:
        taken = {"temperature": 1.0} | taken
    return where, taken


def _of_gguf(keys: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: keys.get(f"general.sampling.{_IN_GGUF.get(name, name)}") for name in _SETTINGS}
    # Floats have 32 bits there: 0.7 was meant, not 0.699999988.
    return {
        name: float(str(np.float32(value))) if isinstance(value, float) else value
        for name, value in found.items()
    }
