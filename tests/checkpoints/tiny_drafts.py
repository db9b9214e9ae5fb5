"""Tiny drafts that take embedding and head from a tiny target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts.checkpoint import HEAD, identity_of, write_draft
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.models.config import ModelConfig
from ssd_jax.testing import tiny

EMBEDDING = "model.embed_tokens.weight"


def open_target(path: Path | str) -> Checkpoint:
    return open_checkpoint(str(path))


def parts(
    target: Checkpoint, ids: np.ndarray | None, layers: int = 1
) -> tuple[ModelConfig, dict[str, str]]:
    """Configuration and ties of a draft of the first layers of a tiny target."""
    target_config = target.config
    config = dataclasses.replace(
        target_config,
        num_layers=layers,
        tie_embeddings=False,
        output_size=None if ids is None else len(ids),
    )
    return config, {EMBEDDING: EMBEDDING, HEAD: EMBEDDING if target_config.tie_embeddings else HEAD}


def write(
    directory: Path,
    target: Checkpoint,
    ids: np.ndarray | None,
    *,
    tensors: Mapping[str, np.ndarray] | None = None,
    seed: int = 0,
    noise: float = 0.0,
    layers: int = 1,
) -> Path:
    """A draft of the first layers of the tiny target of this seed, made worse by noise."""
    config, tied = parts(target, ids, layers)
    if tensors is None:
        tensors = trained_tensors(config.family, seed=seed, noise=noise, layers=layers)
    write_draft(
        directory,
        config=config,
        tensors=tensors,
        tied=tied,
        output_ids=ids,
        target=identity_of(target, tied),
    )
    return directory


def trained_tensors(
    family: str = "llama", *, seed: int = 0, noise: float = 0.0, layers: int = 1
) -> dict[str, np.ndarray]:
    """The tensors that such a draft has of its own, bfloat16."""
    source = target_tensors(family, seed)
    rng = np.random.default_rng(seed + 1)
    found = {}
    for name, array in source.items():
        if name.startswith((*(f"model.layers.{n}." for n in range(layers)), "model.norm")):
            values = array.astype(np.float32) + rng.normal(0, noise, array.shape)
            found[name] = values.astype(ml_dtypes.bfloat16)
    return found


def target_tensors(family: str = "llama", seed: int = 0) -> dict[str, np.ndarray]:
    """Of the tiny target that `tiny.write_checkpoint` writes."""
    return tiny.weights(tiny.config(family), seed)
