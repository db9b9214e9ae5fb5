"""What was trained as a draft checkpoint, which the engine loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ssd_jax.checkpoints.draft_checkpoint import SCALE, Identity, write_draft
from ssd_jax.checkpoints.tokenizer import Tokenizer
from ssd_jax.distill.training.model import EMBEDDING, Draft
from ssd_jax.models.quantized import quantize


def export(
    directory: Path,
    draft: Draft,
    trained: Mapping[str, np.ndarray],
    *,
    store: str,
    target: Identity,
    tokenizer: Tokenizer,
) -> None:
    """Writes the draft; one that lies there already is replaced once the new one is whole.

    Args:
      directory: of the draft checkpoint.
      draft: that was trained.
      trained: float32 arrays by name.
      store: "bfloat16" or "int8", of matrices; vectors stay float32, and an embedding, whose rows
        are only looked up, is at least bfloat16.
      target: see `draft_checkpoint.identity_of`.
      tokenizer: of the target.
    """
    tensors: dict[str, np.ndarray] = {}
    for name, array in trained.items():
        array = np.asarray(array, np.float32)
        if array.ndim == 1:
            tensors[name] = array
        elif store == "int8" and name != EMBEDDING:
            rows = quantize(jnp.asarray(array))
            tensors[name] = np.asarray(rows.values)
            tensors[name + SCALE] = np.asarray(rows.scales)
        else:
            tensors[name] = array.astype(ml_dtypes.bfloat16)
    write_draft(
        directory,
        config=draft.config,
        tensors=tensors,
        tied=draft.tied,
        output_ids=draft.output_ids,
        target=target,
        tokenizer=tokenizer,
        replace=True,
    )
