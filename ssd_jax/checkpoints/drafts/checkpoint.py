"""Draft checkpoints: a draft's own tensors, and the names of tensors taken from its target.

  config.json         architecture, as Hugging Face spells it (`vocab_size` is the target's), and
                      under `ssd_jax_draft`: format version, the target it was made for, tied
                      tensors (own name -> the target's), the name of the tensor of output ids or
                      null, and where known the acceptance
  model.safetensors   own tensors: bfloat16, float32, or int8 rows with their scales (float32 [out]
                      as `NAME_scale`); `output_ids` int32 [N], ascending, of a reduced vocabulary

A tied `lm_head.weight` of a draft with output ids is the rows `output_ids` of the target's tensor.
The tokenizer is the target's. `source` reads these directories.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from ssd_jax.checkpoints.checkpoint import Checkpoint, tensor_structs
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.atomic import new_directory
from ssd_jax.system.paths import require_free

KEY = "ssd_jax_draft"
"""Key in `config.json` that makes a checkpoint a draft's."""

FORMAT = 1
OUTPUT_IDS = "output_ids"
CONFIG, TENSORS = "config.json", "model.safetensors"
HEAD = "lm_head.weight"
SCALE = "_scale"
"""Suffix to the name of a tensor stored as int8 rows: their scales."""

_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "int8": "I8"}
"""Types of a draft's tensors, as NumPy and safetensors name them."""

_BLOCK = 1 << 24
"""Elements of a tied tensor that are read at a time."""


_MAX_SOURCE = 4096
"""Characters of a source, which errors quote."""


class Identity(NamedTuple):
    """The target that a draft was made for.

    Attributes:
      source: as the user named it then; only for messages.
      sha256: see `identity_of`.
    """

    source: str
    sha256: str


class DraftOrigin(NamedTuple):
    """What a draft's configuration contains under `KEY`.

    Attributes:
      tied: the draft's tensor name -> the target's.
      output_ids: name of the tensor of output ids; None if there is none.
      acceptance: share of its likeliest tokens that are the target's, on text that it was not
        trained on; None if that was not measured.
    """

    target: Identity
    tied: Mapping[str, str]
    output_ids: str | None
    acceptance: float | None = None

    @classmethod
    def parse(cls, value: Any, where: str) -> DraftOrigin:
        """Checks and reads the value under `KEY`.

        Raises:
          InputError: it has another format version, or is malformed.
        """
        version = value.get("format") if isinstance(value, dict) else None
        if version != FORMAT:
            raise InputError(
                f"{where}: {KEY} has format {version!r}, this version reads {FORMAT}; use the "
                "version of ssd_jax that wrote the draft, or a newer one, or make the draft again"
            )
        try:
            target, tied, ids = value["target"], value["tied"], value["output_ids"]
            identity = Identity(str(target["source"]), str(target["sha256"]))
            if max(map(len, identity)) > _MAX_SOURCE:
                raise TypeError("'target' must be a source and a digest")
            if not isinstance(tied, dict) or not all(
                isinstance(name, str) for name in tied.values()
            ):
                raise TypeError("'tied' must map names of tensors to names of tensors")
            if not isinstance(ids, str | None):
                raise TypeError("'output_ids' must be the name of a tensor or null")
            acceptance = value.get("acceptance")
            if acceptance is not None and not (
                isinstance(acceptance, int | float) and 0 <= acceptance <= 1
            ):
                raise TypeError("'acceptance' must be a number from 0 to 1")
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{where}: {KEY} is malformed ({type(error).__name__}: {error}); write the draft "
                "again"
            ) from None
        return cls(identity, tied, ids, acceptance)

    @property
    def remedy(self) -> str:
        """What the user can do if the target is another."""
        return (
            f"give the target that it was made for (`target='{self.target.source}'`), or train a "
            "draft for this one with `ssd-jax distill`"
        )


class StoredTensor(NamedTuple):
    """A tensor as described by a file: its shape, and safetensors' name of its type."""

    shape: tuple[int, ...]
    kind: str


def identity_of(target: Checkpoint, tied: Mapping[str, str]) -> Identity:
    """Identifies a draft's target, as far as the draft depends on it.

    `tied` is the draft's tensor name -> the target's. The digest is SHA-256 over three parts, each
    followed by a zero byte: the configuration (JSON of `ModelConfig.to_hf` with sorted keys,
    numbers rounded to float32), the tokens of the vocabulary by id, and, for each tensor of the
    target that is tied, by name: name, shape and values rounded to bfloat16, row by row. So the
    same model in another format (a GGUF file and what `ssd-jax convert` makes of it) is the same
    target, and one with other weights is not, unless the tied tensors are equal. The checkpoint
    caches its digests.

    Raises:
      InputError: the target lacks a tied tensor, or its data cannot be read.
    """
    tensors = frozenset(tied.values())
    if tensors not in target.identities:
        target.identities[tensors] = _digest_of(target, sorted(tensors))
    return Identity(target.source, target.identities[tensors])


def _digest_of(target: Checkpoint, tied: Sequence[str]) -> str:
    digest = hashlib.sha256()

    def add(text: str) -> None:
        digest.update(text.encode() + b"\0")

    add(json.dumps(_round_to_float32(target.config.to_hf()), sort_keys=True))
    tokenizer = target.tokenizer
    add("\n".join(str(tokenizer.token(token)) for token in range(tokenizer.size)))
    tensors = target.tensors
    for name in tied:
        if name not in tensors.shapes:
            raise InputError(
                f"{target.source} has no tensor {name!r}, which a draft is to take from "
                "it; give the target that the draft was made for"
            )
        shape = tensors.shape(name)
        add(f"{name} {list(shape)}")
        rows = max(1, _BLOCK // max(1, int(np.prod(shape[1:], dtype=int))))
        for start in range(0, shape[0], rows):
            block = tensors.read(name, (slice(start, min(start + rows, shape[0])),))
            rounded = np.ascontiguousarray(block.astype(ml_dtypes.bfloat16, copy=False))
            digest.update(rounded.view(np.uint8).data)
        add("")
    return digest.hexdigest()


def _round_to_float32(value: Any) -> Any:
    """Rounds the numbers of a JSON value to float32, as some formats store no more."""
    if isinstance(value, dict):
        return {key: _round_to_float32(item) for key, item in value.items()}
    return float(np.float32(value)) if isinstance(value, float) else value


def write_draft(
    directory: Path,
    *,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    tied: Mapping[str, str],
    output_ids: np.ndarray | None,
    target: Identity,
    tokenizer: Tokenizer | None = None,
    acceptance: float | None = None,
) -> None:
    """Writes a draft checkpoint as a whole or not at all. An existing draft stays until the new one
    is complete.

    Removes what killed writers to the same name have left beside it, so there must be no other
    writer to it at the same time.

    Args:
      directory: to be created; an empty one, or a draft, is replaced.
      config: the draft's architecture; its `output_size` must be the number of output ids.
      tensors: the draft's own tensors, by Hugging Face name: bfloat16, float32, or int8 [out, in]
        with float32 [out] of the same name and `_scale`.
      tied: the draft's tensor name -> the target's.
      output_ids: [N] ids of the head's rows, ascending; None is the whole vocabulary.
      target: see `identity_of`.
      tokenizer: the target's, against which output ids are checked as on reading.
      acceptance: see `DraftOrigin`.

    Raises:
      InputError: the destination holds anything else, the output ids are invalid, or the tensors do
        not match the configuration.
      OSError: the disk is full, or cannot be written; previous content is unchanged.
    """
    where = str(directory)
    check_output_ids(config, output_ids, where=where, tokenizer=tokenizer)
    stored = {
        name: StoredTensor(array.shape, _DTYPE_NAMES.get(array.dtype.name, array.dtype.name))
        for name, array in tensors.items()
    }
    check_stored(config, stored, tied, where=where)
    directory = directory.expanduser().absolute()
    _require_free(directory)
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if output_ids is not None:
        arrays[OUTPUT_IDS] = np.ascontiguousarray(output_ids, np.int32)
    origin = {
        "format": FORMAT,
        "target": target._asdict(),
        "tied": dict(sorted(tied.items())),
        "output_ids": None if output_ids is None else OUTPUT_IDS,
    }
    if acceptance is not None:
        origin["acceptance"] = round(acceptance, 3)
    with new_directory(directory, durable=True) as partial:
        (partial / TENSORS).write_bytes(save(arrays))
        text = json.dumps(config.to_hf() | {KEY: origin}, indent=1)
        (partial / CONFIG).write_text(text + "\n", encoding="utf-8")
        _require_free(directory)


def _require_free(directory: Path) -> None:
    """Refuses a destination that holds anything but a draft."""
    config = directory / CONFIG
    if config.is_file() and KEY in config.read_text(encoding="utf-8", errors="replace"):
        return
    require_free(directory)


def check_output_ids(
    config: ModelConfig, ids: np.ndarray | None, *, where: str, tokenizer: Tokenizer | None = None
) -> None:
    """Refuses an invalid reduced vocabulary.

    Args:
      ids: ids of the head's rows; None is the whole vocabulary.
      tokenizer: the target's, which determines the ids that exist and those that are required;
        without one, all embedded ids are allowed.

    Raises:
      InputError: the ids are no list of integers, not ascending, out of range, without an id that
        ends a text or is special, or not as many as configured; or the embedding, which has a row
        for every id, is tied.
    """
    if ids is not None and (
        ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids)
    ):
        raise InputError(
            f"{where}: output ids must be a list of integers, not {ids.dtype} "
            f"of shape {ids.shape}; write the draft again"
        )
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
    size = config.vocab_size if tokenizer is None else tokenizer.size
    out_of_range = ids[(ids < 0) | (ids >= size)]
    if len(out_of_range):
        raise InputError(
            f"{where}: output id {out_of_range[0]} is out of range, ids are 0 to {size - 1}; the "
            "file is damaged or was not written by ssd_jax: get it again, or train the draft again "
            "with `ssd-jax distill`"
        )
    descends = np.flatnonzero(np.diff(ids.astype(np.int64)) <= 0)
    if len(descends):
        index = int(descends[0])
        raise InputError(
            f"{where}: output ids must ascend, but id {ids[index + 1]} follows {ids[index]} at "
            f"place {index + 1}; sort them, and the head's rows with them"
        )
    if tokenizer is None:
        return
    for required_ids, purpose in (
        (tokenizer.eos_ids, "end a text: the draft could never propose an end"),
        (tokenizer.special_ids, "are special tokens: the draft could never propose them"),
    ):
        missing = sorted(required_ids - set(ids.tolist()))
        if missing:
            raise InputError(
                f"{where}: output ids lack {missing}, which {purpose}; make the draft again "
                "with them in its map"
            )


def check_stored(
    config: ModelConfig, stored: Mapping[str, StoredTensor], tied: Mapping[str, str], *, where: str
) -> None:
    """Refuses own tensors, scales included, that do not make up a draft with the tied ones.

    Raises:
      InputError: a tensor is missing, surplus or duplicate, or has another shape or type.
    """
    shapes = {name: struct.shape for name, struct in tensor_structs(config).items()}
    own_names = {name for name in stored if not name.endswith(SCALE)}
    for names, fault in (
        (own_names & tied.keys(), "both stored and tied"),
        (shapes.keys() - own_names - tied.keys(), "missing"),
        ((own_names | tied.keys()) - shapes.keys(), "surplus"),
    ):
        if names:
            raise InputError(
                f"{where}: tensor {min(names)!r} is {fault}; a draft has each tensor of its "
                "configuration once, stored or tied: write it again"
            )
    for name in sorted(own_names):
        shape, kind = stored[name]
        scales = stored.get(name + SCALE)
        if shape != shapes[name]:
            problem = (
                f"has shape {shape}, the configuration says {shapes[name]}; write the draft again"
            )
        elif kind not in _DTYPE_NAMES.values():
            problem = f"has type {kind}; a draft's are F32, BF16, or I8 with scales: write it again"
        elif kind == "I8" and len(shape) != 2:
            problem = (
                f"of shape {shape} is int8, which only matrices may be; store it as F32 or BF16"
            )
        elif kind == "I8" and scales != StoredTensor(shape[:1], "F32"):
            problem = (
                f"is int8 and needs {name + SCALE!r}, F32 of shape {shape[:1]}, not "
                f"{scales or 'nothing'}; write the draft again"
            )
        else:
            continue
        raise InputError(f"{where}: tensor {name!r} {problem}")
    for name in sorted(stored.keys() - own_names):
        scaled = stored.get(name.removesuffix(SCALE))
        if scaled is None or scaled.kind != "I8":
            raise InputError(
                f"{where}: {name!r} are scales of a tensor that is not stored as int8; write the "
                "draft again"
            )
