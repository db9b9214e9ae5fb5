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
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.weights.config_json import to_hf
from ssd_jax.weights.orbax import require_free

if TYPE_CHECKING:
    from ssd_jax.text.tokenizer import Tokenizer
    from ssd_jax.weights.checkpoint import Checkpoint

KEY = "ssd_jax_draft"
"""In `config.json`: what makes a checkpoint a draft's."""

FORMAT = 1
OUTPUT_IDS = "output_ids"
HEAD = "lm_head.weight"
SCALE = "_scale"
"""After the name of a tensor stored as int8 rows: their scales."""

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
) -> None:
    """Writes a draft checkpoint: all of it or nothing.

    Everything is written beside `directory` and renamed at the end.

    Args:
      directory: to be created; an empty one is replaced.
      config: the draft's architecture; its `output_size` must be the number of output ids.
      tensors: the draft's own, by Hugging Face name: bfloat16, float32, or int8 [out, in] with
        float32 [out] of the same name and `_scale`.
      tied: the draft's tensor name -> the target's.
      output_ids: [N] ids of the head's rows, ascending; None is the whole vocabulary.
      target: see `identity_of`.

    Raises:
      InputError: the destination holds something, output ids that cannot be, or tensors that do not
        make up the configuration.
    """
    check_output_ids(config, output_ids, where=str(directory))
    _check_tensors(config, tensors, tied, where=str(directory))
    directory = directory.expanduser().absolute()
    require_free(directory)
    partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        _write(partial, config, tensors, tied, output_ids, target)
        require_free(directory)
        if directory.exists():
            directory.rmdir()
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_output_ids(
    config: ModelConfig,
    ids: np.ndarray | None,
    *,
    where: str,
    size: int | None = None,
    eos_ids: Collection[int] = (),
) -> None:
    """Refuses a reduced vocabulary that cannot be.

    Args:
      config: of the draft.
      ids: of the head's rows; None is the whole vocabulary.
      where: names the draft in errors.
      size: ids that the tokenizer has; None is all that are embedded.
      eos_ids: that must be among them.

    Raises:
      InputError: not ascending, out of range, without an id that ends a text, another number than
        the configuration says, or a tied embedding, which has a row for every id.
    """
    count = None if ids is None else len(ids)
    if count != config.output_size:
        raise InputError(
            f"{where}: {count or 'no'} output ids for output_size = {config.output_size}; "
            "write the draft again with as many ids as its head has rows"
        )
    if ids is None:
        return
    if config.tie_embeddings:
        raise InputError(
            f"{where}: a reduced output vocabulary needs a head of its own, but "
            f"tie_word_embeddings is true; tie {HEAD!r} to the target's tensor instead"
        )
    size = config.vocab_size if size is None else size
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        raise InputError(
            f"{where}: output ids must be a list of integers, not {ids.dtype} "
            f"of shape {ids.shape}; write the draft again"
        )
    if ids.min() < 0 or ids.max() >= size:
        wrong = ids[(ids < 0) | (ids >= size)][0]
        raise InputError(
            f"{where}: output id {wrong} is out of range, ids are 0 to {size - 1}; the draft was "
            "not made for this vocabulary: make it again"
        )
    descends = np.flatnonzero(np.diff(ids.astype(np.int64)) <= 0)
    if len(descends):
        place = int(descends[0])
        raise InputError(
            f"{where}: output ids must ascend, but id {ids[place + 1]} follows {ids[place]} at "
            f"place {place + 1}; sort them, and the head's rows with them"
        )
    missing = sorted(set(eos_ids) - set(ids.tolist()))
    if missing:
        raise InputError(
            f"{where}: output ids lack {missing}, which end a text: the draft could never propose "
            "an end; make the draft again with them in its map"
        )


def _check_tensors(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], tied: Mapping[str, str], *, where: str
) -> None:
    from ssd_jax.models.execution import Execution
    from ssd_jax.models.functional import FunctionalModel

    execution = Execution.for_platform("cpu", "float32")
    wanted = {name: s.shape for name, s in FunctionalModel(config, execution).wanted().items()}
    own = {name: array.shape for name, array in tensors.items() if not name.endswith(SCALE)}
    twice, missing = (
        sorted(own.keys() & tied.keys()),
        sorted(wanted.keys() - own.keys() - tied.keys()),
    )
    surplus = sorted((own.keys() | tied.keys()) - wanted.keys())
    for names, what in (
        (twice, "both stored and tied"),
        (missing, "missing"),
        (surplus, "surplus"),
    ):
        if names:
            raise InputError(f"{where}: tensor {names[0]!r} is {what}; it must be given once")
    for name, shape in own.items():
        if shape != wanted[name]:
            raise InputError(
                f"{where}: tensor {name!r} has shape {shape}, the configuration says {wanted[name]}"
            )
        _check_type(name, tensors, where)
    for name in tensors.keys() - own.keys():
        of = tensors.get(name.removesuffix(SCALE))
        if of is None or of.dtype != np.int8:
            raise InputError(f"{where}: {name!r} are scales of a tensor that is not stored as int8")


def _check_type(name: str, tensors: Mapping[str, np.ndarray], where: str) -> None:
    array, scales = tensors[name], tensors.get(name + SCALE)
    if array.dtype == np.int8:
        if scales is None or scales.shape != array.shape[:1] or scales.dtype != np.float32:
            raise InputError(
                f"{where}: int8 tensor {name!r} needs {name + SCALE!r}, float32 of shape "
                f"{array.shape[:1]}"
            )
    elif array.dtype not in (np.float32, ml_dtypes.bfloat16):
        raise InputError(
            f"{where}: tensor {name!r} has type {array.dtype}; a draft's are bfloat16, float32 or "
            "int8 with scales"
        )


def _write(
    directory: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tied: Mapping[str, str],
    output_ids: np.ndarray | None,
    target: Identity,
) -> None:
    from safetensors.numpy import save_file

    stored = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if output_ids is not None:
        stored[OUTPUT_IDS] = np.ascontiguousarray(output_ids, np.int32)
    save_file(stored, directory / TENSORS)
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
