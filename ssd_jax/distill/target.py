"""The target of a distillation: found, its tokenizer read, and identified by a digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from ssd_jax.checkpoints.checkpoint import Checkpoint, open_checkpoint
from ssd_jax.checkpoints.orbax import origin
from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.checkpoints.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The target without its weights.

    Attributes:
      sha256: of its architecture, vocabulary, chat template (its source: what it writes may depend
        on the day), the tokens that begin and end a text, and the files that its weights came
        from. What `ssd-jax convert` wrote of a checkpoint has the checkpoint's own.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    sha256: str


def open_target(source: str, *, progress: Progress | None = None) -> Target:
    """Finds a target, downloads it if need be, and reads it once for its digest.

    Raises:
      InputError: see `open_checkpoint`.
    """
    checkpoint = open_checkpoint(source, progress=progress)
    tokenizer = checkpoint.load_tokenizer()
    tokens = [tokenizer.token(token) for token in range(tokenizer.size)]
    files = origin(checkpoint.path)
    template = tokenizer.chat_template
    # Jinja reads every line end as the same, and a copy of the file may have others.
    chat = None if template is None else template.replace("\r\n", "\n").replace("\r", "\n")
    ends = [tokenizer.bos_id, sorted(tokenizer.eos_ids)]
    identity = [checkpoint.config.to_hf(), tokens, chat, ends, sorted(files.values())]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return Target(checkpoint=checkpoint, tokenizer=tokenizer, sha256=digest)
