"""A checkpoint of any format: configuration, tensors and tokenizer behind one interface."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.checkpoints.weights.tensors import TensorSource
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import reading

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model that can be loaded; opening it reads headers only.

    Attributes:
      source: as the user gave it.
      path: local file or directory.
      config: architecture.
      tensors: the weights, read when asked for.
      load_tokenizer: reads the tokenizer.
      output_ids: [N] int32, ascending: tokens of the head's rows, if it does not have all (see
        `ModelConfig.output_size`).
      target_digest: of a draft checkpoint, the digest of its target, see
        `drafts.checkpoint.identity_of`.
      acceptance: of a draft checkpoint, see `drafts.checkpoint.DraftOrigin`.
      digest: of a draft checkpoint, reads its own tensors and returns their digest.
      identities: known digests of `drafts.checkpoint.identity_of`, by the tensors that they cover.
    """

    source: str
    path: Path
    config: ModelConfig
    tensors: TensorSource
    load_tokenizer: Callable[[], Tokenizer]
    output_ids: np.ndarray | None = None
    target_digest: str | None = None
    acceptance: float | None = None
    digest: Callable[[], str] | None = None
    identities: dict[frozenset[str], str] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the tensors, read on first access, without added tokens
        that the model does not embed.

        Raises:
          InputError: it cannot be read, or has tokens that the model does not embed and that are
            needed (`Tokenizer.within`).
        """
        with reading(self.path):
            return self.load_tokenizer().within(self.config.vocab_size)


def tensor_structs(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Name and shape of every tensor of a model."""
    from ssd_jax.models.execution import Execution
    from ssd_jax.models.functional import FunctionalModel

    return FunctionalModel(config, Execution.for_platform("cpu", "float32")).checkpoint_structs()
