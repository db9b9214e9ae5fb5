"""Running our decoder on a checkpoint directory, for comparison with stored and live oracles."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel

POSITIONS = 40
"""Of the stored texts."""

FLOAT32 = Execution(compute=jnp.dtype(jnp.float32), pages=jnp.dtype(jnp.float32))
ON_TPUS: dict[str, Any] = {
    "scan_layers": True,
    "blocks": True,
    "whole_tiles": True,
    "window_writes": True,
    "attention": "xla_static",
    "one_array": True,
}
ON_GPUS: dict[str, Any] = {"few_arrays": True, "attention": "xla_static", "one_array": True}


@contextlib.contextmanager
def execution_as(**there) -> Iterator[None]:
    """Within, models are opened with these fields of `Execution`, as on an accelerator."""
    usual = Execution.for_platform

    def as_there(platform, compute, **choices):
        return dataclasses.replace(usual(platform, compute, **choices), **there)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Execution, "for_platform", as_there)
        yield


class Runner:
    """A model over contiguous pages, run on any chunk of tokens."""

    def __init__(self, model: FunctionalModel, parameters, *, slots: int, context: int = BLOCK):
        self.model, self.parameters = model, parameters
        self.pages = model.new_pages(slots, -(-context // BLOCK) * BLOCK)
        self._run = jax.jit(self._forward)

    def __call__(self, tokens: np.ndarray, start: int | np.ndarray = 0) -> np.ndarray:
        """Logits [B, R, V] of tokens [B, R] at positions start, start + 1, ..."""
        starts = np.broadcast_to(np.asarray(start, np.int32), tokens.shape[:1])
        logits, self.pages = self._run(self.parameters, self.pages, tokens, starts)
        return np.asarray(logits)

    def _forward(self, parameters, pages, tokens, starts):
        module = self.model.module(parameters)
        positions = starts[:, None] + jnp.arange(tokens.shape[1])
        hidden, pages, _ = module.hidden(tokens, positions, positions + 1, pages, Contiguous())
        logits = module.logits(hidden.reshape(tokens.size, -1))
        return logits.reshape(*tokens.shape, -1), pages


def runner(
    directory: Path,
    *,
    slots: int,
    context: int = BLOCK,
    execution: Execution = FLOAT32,
    positions: int = POSITIONS,
    **changes,
) -> Runner:
    """A `Runner` on a checkpoint, for texts of so many positions; `changes` are fields of
    `Execution`."""
    checkpoint = open_checkpoint(str(directory))
    config = checkpoint.config.for_context(positions)
    model = FunctionalModel(config, dataclasses.replace(execution, **changes))
    return Runner(model, parameters(checkpoint, model), slots=slots, context=context)


def parameters(checkpoint: Checkpoint, model: FunctionalModel) -> list[jax.Array]:
    """A checkpoint's weights, as the model takes them."""
    return load_parameters(checkpoint.tensors, model, where=str(checkpoint.path))


def our_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits [B, T, V] of whole sequences tokens [B, T]."""
    run = runner(directory, slots=tokens.shape[0], positions=tokens.shape[1])
    return run(tokens.astype(np.int32))
