"""What must hold of a draft checkpoint's tensors and output ids, when written and when read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig

if TYPE_CHECKING:
    import jax

    from ssd_jax.checkpoints.tokenizer import Tokenizer

HEAD = "lm_head.weight"
SCALE = "_scale"
"""After the name of a tensor stored as int8 rows: their scales."""


class Stored(NamedTuple):
    """What a file says of a tensor.

    Attributes:
      shape: as stored.
      kind: its type, as safetensors names it.
    """

    shape: tuple[int, ...]
    kind: str


def check_output_ids(
    config: ModelConfig,
    ids: np.ndarray | None,
    *,
    where: str,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Refuses a reduced vocabulary that cannot be.

    Args:
      config: of the draft.
      ids: of the head's rows; None is the whole vocabulary.
      where: names the draft in errors.
      tokenizer: the target's, which says what ids there are and which of them must be in; without
        one all ids that are embedded may be.

    Raises:
      InputError: not ascending, out of range, without an id that ends a text or is special, another
        number than the configuration says, or a tied embedding, which has a row for every id.
    """
    if ids is not None:
        check_list(ids, where=where)
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
    if ids.min() < 0 or ids.max() >= size:
        wrong = ids[(ids < 0) | (ids >= size)][0]
        raise InputError(
            f"{where}: output id {wrong} is out of range, ids are 0 to {size - 1}; the file is "
            "damaged or was not written by ssd_jax: get it again, or train the draft again with "
            "`ssd-jax distill`"
        )
    descends = np.flatnonzero(np.diff(ids.astype(np.int64)) <= 0)
    if len(descends):
        place = int(descends[0])
        raise InputError(
            f"{where}: output ids must ascend, but id {ids[place + 1]} follows {ids[place]} at "
            f"place {place + 1}; sort them, and the head's rows with them"
        )
    if tokenizer is None:
        return
    for needed, what in (
        (tokenizer.eos_ids, "end a text: the draft could never propose an end"),
        (tokenizer.special_ids, "are special tokens: the draft could never propose them"),
    ):
        missing = sorted(needed - set(ids.tolist()))
        if missing:
            raise InputError(
                f"{where}: output ids lack {missing}, which {what}; make the draft again with them "
                "in its map"
            )


def check_list(ids: np.ndarray, *, where: str) -> None:
    """Refuses output ids that are no list of integers, at least one.

    Raises:
      InputError: they are not.
    """
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        raise InputError(
            f"{where}: output ids must be a list of integers, not {ids.dtype} "
            f"of shape {ids.shape}; write the draft again"
        )


def wanted_of(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Name and shape of every tensor of a draft."""
    from ssd_jax.models.execution import Execution
    from ssd_jax.models.functional import FunctionalModel

    return FunctionalModel(config, Execution.for_platform("cpu", "float32")).wanted()


def check_stored(
    config: ModelConfig, stored: Mapping[str, Stored], tied: Mapping[str, str], *, where: str
) -> None:
    """Refuses own tensors that, with the tied ones, do not make up a draft.

    Args:
      config: the draft's architecture.
      stored: own tensors, scales of int8 ones included.
      tied: the draft's tensor name -> the target's.
      where: names the draft in errors.

    Raises:
      InputError: a tensor that is missing, surplus or there twice, or of another shape or type.
    """
    wanted = {name: struct.shape for name, struct in wanted_of(config).items()}
    own = {name for name in stored if not name.endswith(SCALE)}
    for names, what in (
        (own & tied.keys(), "both stored and tied"),
        (wanted.keys() - own - tied.keys(), "missing"),
        ((own | tied.keys()) - wanted.keys(), "surplus"),
    ):
        if names:
            raise InputError(
                f"{where}: tensor {min(names)!r} is {what}; a draft has each tensor of its "
                "configuration once, stored or tied: write it again"
            )
    for name in sorted(own):
        shape, kind = stored[name]
        if shape != wanted[name]:
            raise InputError(
                f"{where}: tensor {name!r} has shape {shape}, the configuration says "
                f"{wanted[name]}; write the draft again"
            )
        if kind == "I8":
            _check_int8(name, stored, where)
        elif kind not in ("F32", "BF16"):
            raise InputError(
                f"{where}: tensor {name!r} has type {kind}; a draft's are F32, BF16, or I8 with "
                "scales: write the draft again"
            )
    for name in sorted(stored.keys() - own):
        of = stored.get(name.removesuffix(SCALE))
        if of is None or of.kind != "I8":
            raise InputError(
                f"{where}: {name!r} are scales of a tensor that is not stored as int8; write the "
                "draft again"
            )


def _check_int8(name: str, stored: Mapping[str, Stored], where: str) -> None:
    shape = stored[name].shape
    if len(shape) != 2:
        raise InputError(
            f"{where}: tensor {name!r} of shape {shape} is int8, which only matrices may be; "
            "store it as F32 or BF16"
        )
    if stored.get(name + SCALE) != Stored(shape[:1], "F32"):
        raise InputError(
            f"{where}: int8 tensor {name!r} needs {name + SCALE!r}, F32 of shape {shape[:1]}, not "
            f"{stored.get(name + SCALE, 'nothing')}; write the draft again"
        )
