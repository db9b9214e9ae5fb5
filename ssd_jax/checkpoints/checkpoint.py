"""A checkpoint of any format: configuration, tensors and tokenizer behind one face."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ssd_jax.checkpoints.tensors import TensorSource
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np

    from ssd_jax.checkpoints.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model that can be loaded; opening it reads headers only.

    Attributes:
      source: as the user gave it.
      path: local file or directory.
      config: architecture.
      tensors: the weights, read when asked for.
      load_tokenizer: reads the tokenizer that comes with them.
      output_ids: [N] int32, ascending: tokens of the head's rows, where it has not all (see
        `ModelConfig.output_size`).
      made_for: of a draft checkpoint, the digest of its target (`draft_checkpoint.identity_of`).
      digest: of a draft checkpoint, reads its own tensors and gives a digest of them.
    """

    source: str
    path: Path
    config: ModelConfig
    tensors: TensorSource
    load_tokenizer: Callable[[], Tokenizer]
    output_ids: np.ndarray | None = None
    made_for: str | None = None
    digest: Callable[[], str] | None = None


def fitting(tokenizer: Tokenizer, config: ModelConfig, path: Path) -> Tokenizer:
    """A checkpoint's tokenizer, checked to have no more tokens than the model embeds.

    Raises:
      InputError: it has.
    """
    if tokenizer.size > config.vocab_size:
        raise InputError(
            f"{path}: the tokenizer has {tokenizer.size} tokens, the model embeds "
            f"{config.vocab_size}; they do not belong together, or the embedding was not resized"
        )
    return tokenizer
