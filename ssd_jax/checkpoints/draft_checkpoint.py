"""Draft checkpoints: a draft's own tensors, and the names of those that it takes from its target.

  config.json         architecture, as Hugging Face spells it (`vocab_size` is the target's), and
                      under `ssd_jax_draft`: format version, the target it was made for, tied
                      tensors (own name -> the target's), the name of the tensor of output ids or
                      null
  model.safetensors   own tensors: bfloat16, float32, or int8 rows with their scales (float32 [out]
                      as `NAME_scale`); `output_ids` int32 [N], ascending, of a reduced vocabulary

A tied `lm_head.weight` of a draft with output ids is the rows `output_ids` of the target's tensor.
The tokenizer is the target's. `draft_source` reads these directories.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from ssd_jax.atomic import clear_partial, new_directory
from ssd_jax.checkpoints.config_json import to_hf
from ssd_jax.checkpoints.draft_checks import HEAD, SCALE, Stored, check_output_ids, check_stored
from ssd_jax.checkpoints.orbax import require_free
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig

if TYPE_CHECKING:
    from ssd_jax.checkpoints.checkpoint import Checkpoint
    from ssd_jax.checkpoints.tokenizer import Tokenizer

__all__ = ["HEAD", "SCALE", "Identity", "Target", "identity_of", "write_draft"]

KEY = "ssd_jax_draft"
"""In `config.json`: what makes a checkpoint a draft's."""

FORMAT = 1
OUTPUT_IDS = "output_ids"

CONFIG, TENSORS = "config.json", "model.safetensors"
_BLOCK = 1 << 24
"""Elements of a tied tensor that are read at once."""


class Target(Protocol):
    """A target that is found, of which tensors can be read; `OpenedModel` is one."""

    @property
    def checkpoint(self) -> Checkpoint:
        """Configuration and tensors."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Which target a draft was made for.

    Attributes:
      source: as the user named it then; for messages only.
      sha256: see `identity_of`.
    """

    source: str
    sha256: str


def identity_of(target: Target, tied: Mapping[str, str]) -> Identity:
    """What a draft's target must be, as far as the draft depends on it.

    The digest is SHA-256 over three parts, each followed by a zero byte: the configuration (JSON of
    `config_json.to_hf` with sorted keys, numbers rounded to float32), the tokens of the vocabulary
    by id, and, for each tensor of the target that is tied, by name: name, shape and values rounded
    to bfloat16, row by row. So the same model in another format (a GGUF file and what
    `ssd-jax convert` makes of it) is the same target, and one with other weights is not, unless the
    tied tensors are alike.

    Args:
      target: opened, with its tokenizer.
      tied: the draft's tensor name -> the target's.

    Raises:
      InputError: the target lacks a tied tensor, or its data cannot be read.
    """
    digest = hashlib.sha256()

    def add(text: str) -> None:
        digest.update(text.encode() + b"\0")

    add(json.dumps(_in_float32(to_hf(target.checkpoint.config)), sort_keys=True))
    vocabulary = target.tokenizer
    add("\n".join(str(vocabulary.token(token)) for token in range(vocabulary.size)))
    tensors = target.checkpoint.tensors
    for name in sorted(set(tied.values())):
        if name not in tensors.names():
            raise InputError(
                f"{target.checkpoint.source} has no tensor {name!r}, which a draft is to take from "
                "it; give the target that the draft was made for"
            )
        shape = tensors.shape(name)
        add(f"{name} {list(shape)}")
        rows = max(1, _BLOCK // max(1, int(np.prod(shape[1:], dtype=int))))
        for first in range(0, shape[0], rows):
            block = tensors.read(name, (slice(first, min(first + rows, shape[0])),))
            rounded = np.ascontiguousarray(block.astype(ml_dtypes.bfloat16, copy=False))
            digest.update(rounded.view(np.uint8).data)
        add("")
    return Identity(source=target.checkpoint.source, sha256=digest.hexdigest())


def write_draft(
    directory: Path,
    *,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tied: Mapping[str, str],
    output_ids: np.ndarray | None,
    target: Identity,
    tokenizer: Tokenizer | None = None,
    replace: bool = False,
) -> None:
    """Writes a draft checkpoint: all of it or nothing.

    Everything is written beside `directory`, reaches the disk, and is renamed at the end. What a
    writer to the same name that was killed has left beside it is removed, so there must be no
    other writer to it at the same time.

    Args:
      directory: to be created; an empty one is replaced.
      config: the draft's architecture; its `output_size` must be the number of output ids.
      tensors: the draft's own, by Hugging Face name: bfloat16, float32, or int8 [out, in] with
        float32 [out] of the same name and `_scale`.
      tied: the draft's tensor name -> the target's.
      output_ids: [N] ids of the head's rows, ascending; None is the whole vocabulary.
      target: see `identity_of`.
      tokenizer: of the target, against which output ids are checked as the reader does.
      replace: whether a draft that is there already is replaced; it stays until the new one is
        whole.

    Raises:
      InputError: the destination holds something that is not to be replaced, output ids that cannot
        be, or tensors that do not make up the configuration.
      OSError: the disk is full, or cannot be written; what was there before is as it was.
    """
    where = str(directory)
    check_output_ids(config, output_ids, where=where, tokenizer=tokenizer)
    stored = {name: Stored(array.shape, _kind(array)) for name, array in tensors.items()}
    check_stored(config, stored, tied, where=where)
    directory = directory.expanduser().absolute()
    _require_free(directory, replace)
    directory.parent.mkdir(parents=True, exist_ok=True)
    clear_partial(directory.parent, directory.name)
    with new_directory(directory, durable=True) as partial:
        _write(partial, config, tensors, tied, output_ids, target)
        _require_free(directory, replace)


def _kind(array: np.ndarray) -> str:
    """The type of an array, as safetensors names it where a draft may have it."""
    return {"float32": "F32", "bfloat16": "BF16", "int8": "I8"}.get(
        array.dtype.name, array.dtype.name
    )


def _require_free(directory: Path, replace: bool) -> None:
    """Refuses a destination that holds anything; `replace` allows a draft."""
    config = directory / CONFIG
    if replace and config.is_file() and KEY in config.read_text(encoding="utf-8", errors="replace"):
        return
    require_free(directory)


def _write(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tied: Mapping[str, str],
    output_ids: np.ndarray | None,
    target: Identity,
) -> None:
    from safetensors.numpy import save

    stored = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if output_ids is not None:
        stored[OUTPUT_IDS] = np.ascontiguousarray(output_ids, np.int32)
    (directory / TENSORS).write_bytes(save(stored))
    about = {
        "format": FORMAT,
        "target": dataclasses.asdict(target),
        "tied": dict(sorted(tied.items())),
        "output_ids": None if output_ids is None else OUTPUT_IDS,
    }
    text = json.dumps(to_hf(config) | {KEY: about}, indent=1)
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def _in_float32(value: Any) -> Any:
    """Numbers of a JSON value as float32 has them: some formats store no more."""
    if isinstance(value, dict):
        return {key: _in_float32(item) for key, item in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value
