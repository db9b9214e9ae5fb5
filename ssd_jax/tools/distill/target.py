"""The target of a distillation, and the digest that identifies what is made of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.orbax import origin
from ssd_jax.checkpoints.weights.tensors import Progress


@dataclasses.dataclass(frozen=True)
class DistillTarget:
    """The target without its weights.

    Attributes:
      sha256: of its architecture, vocabulary, chat template (its source: what it writes may depend
        on the day), the tokens that begin and end a text, and the files that its weights came
        from. What `ssd-jax convert` made of a checkpoint has the checkpoint's digest.
    """

    checkpoint: Checkpoint
    sha256: str


def open_target(source: str, *, progress: Progress | None = None) -> DistillTarget:
    """Finds a target, downloads it if need be, and reads it once for its digest.

    Raises:
      InputError: see `open_checkpoint`.
    """
    checkpoint = open_checkpoint(source, progress=progress)
    tokenizer = checkpoint.tokenizer
    tokens = [tokenizer.token(token) for token in range(tokenizer.size)]
    # Jinja treats all line ends alike, and a copy of the file may have others.
    chat = None
    if tokenizer.has_chat_template:
        chat = tokenizer.get_chat_template().replace("\r\n", "\n").replace("\r", "\n")
    ends = [tokenizer.bos_id, sorted(tokenizer.eos_ids)]
    files = sorted(origin(checkpoint.path).values())
    sha256 = digest([checkpoint.config.to_hf(), tokens, chat, ends, files])
    return DistillTarget(checkpoint, sha256)


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
