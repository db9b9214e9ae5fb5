"""Reading a draft checkpoint: its own tensors, and the tied ones out of the target's source."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.weights.checkpoint import Checkpoint
from ssd_jax.weights.draft_checkpoint import (
    CONFIG,
    FORMAT,
    HEAD,
    KEY,
    SCALE,
    TENSORS,
    Target,
    check_output_ids,
    identity_of,
)
from ssd_jax.weights.safetensors import open_file
from ssd_jax.weights.tensors import Index, TensorSource, bounds

_TYPES = ("F32", "BF16", "I8")
_BLOCK = 1 << 24
"""Elements of the target's tensor that are read at once for rows of it."""


class _About(NamedTuple):
    """What a draft's configuration says of it."""

    source: str
    sha256: str
    tied: Mapping[str, str]
    output_ids: str | None


def open_draft(
    source: str, path: Path, config: Mapping[str, Any], target: Target | None
) -> Checkpoint:
    """A draft over its target; reads headers, output ids and, to check them, the tied tensors.

    Args:
      source: as the user named the draft.
      path: its directory.
      config: what its `config.json` holds.
      target: from which it takes the tied tensors and the tokenizer.

    Raises:
      InputError: no target, because the draft was named as a model of its own; another target than
        it was made for; another format version; a file or a map that is damaged.
    """
    where = str(path / CONFIG)
    about = _about(config[KEY], where)
    if target is None:
        raise InputError(
            f"{source} is a draft made for the target {about.source}, no model of its own: give it "
            f"as the draft (--draft={source}) beside its target (--target={about.source})"
        )
    own = open_file(path / TENSORS)
    output_ids = None
    if about.output_ids is not None:
        if about.output_ids not in own.keys():  # noqa: SIM118 (no mapping)
            raise InputError(
                f"{path / TENSORS} has no tensor {about.output_ids!r}, the output ids that "
                f"{where} names; the files do not belong together: get both again"
            )
        output_ids = np.array(own.get_tensor(about.output_ids))
    _require_tied(about, target, where)
    size = None if output_ids is None else len(output_ids)
    shape = ModelConfig.from_hf(config, where=where, output_size=size)
    tensors = DraftTensors(path / TENSORS, own, about, target.checkpoint.tensors, output_ids)
    _require_identity(about, target, path)
    tokenizer = target.tokenizer
    check_output_ids(
        shape, output_ids, where=str(path), size=tokenizer.size, eos_ids=tokenizer.eos_ids
    )
    return Checkpoint(
        source=source,
        path=path,
        config=shape,
        tensors=tensors,
        load_tokenizer=lambda: tokenizer,
        output_ids=None if output_ids is None else output_ids.astype(np.int32),
        made_for=about.sha256,
    )


class DraftTensors:
    """Own and tied tensors under the draft's names; a `TensorSource`.

    Args:
      path: of the own ones, for messages.
      own: that file, opened.
      about: what is tied.
      target: where tied ones are.
      output_ids: [N], rows of the target's tensor that are a tied head.

    Raises:
      InputError: a tensor that is stored in another way than a draft's are.
    """

    def __init__(
        self,
        path: Path,
        own: Any,
        about: _About,
        target: TensorSource,
        output_ids: np.ndarray | None,
    ) -> None:
        self._own, self._tied, self._target = own, about.tied, target
        self._ids = output_ids
        stored = frozenset(own.keys()) - {about.output_ids}
        self._names = frozenset(name for name in stored if not name.endswith(SCALE))
        self._int8 = {n for n in self._names if own.get_slice(n).get_dtype() == "I8"}
        for name in sorted(self._names):
            kind = own.get_slice(name).get_dtype()
            if kind not in _TYPES or (kind == "I8" and name + SCALE not in stored):
                what = "int8 without scales" if kind == "I8" else f"type {kind}"
                raise InputError(
                    f"{path}: tensor {name!r} is {what}; a draft's are {', '.join(_TYPES)}, the "
                    "last with scales: write the draft again"
                )

    def names(self) -> frozenset[str]:
        """Names of all tensors, own and tied."""
        return self._names | self._tied.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from headers."""
        if name not in self._tied:
            return tuple(self._own.get_slice(name).get_shape())
        whole = self._target.shape(self._tied[name])
        return whole if self._ids is None or name != HEAD else (len(self._ids), *whole[1:])

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A tensor or a part of it; float32 where it is stored as int8."""
        part = bounds(index, self.shape(name))
        if name in self._tied:
            if self._ids is None or name != HEAD:
                return self._target.read(self._tied[name], part)
            return _rows(self._target, self._tied[name], self._ids[part[0]], part[1:])
        array = self._own.get_slice(name)[part]
        if name in self._int8:
            return array * self._own.get_slice(name + SCALE)[part[:1]][:, None]
        return array


def _rows(target: TensorSource, name: str, ids: np.ndarray, columns: Index) -> np.ndarray:
    """Rows `ids`, ascending, of one of the target's matrices; reads a block of it at a time."""
    shape = target.shape(name)
    step = max(1, _BLOCK // max(1, shape[1]))
    picked = [target.read(name, (slice(0, 0), *columns))]
    for first in range(0, shape[0], step):
        here = ids[(ids >= first) & (ids < first + step)]
        if len(here):
            low, high = int(here[0]), int(here[-1]) + 1
            block = target.read(name, (slice(low, high), *columns))
            picked.append(block[here - low])
    return np.concatenate(picked)


def _about(said: Any, where: str) -> _About:
    """Checks what the configuration says of the draft."""
    version = said.get("format") if isinstance(said, dict) else None
    if version != FORMAT:
        raise InputError(
            f"{where}: {KEY} has format {version!r}, this version reads {FORMAT}; use the version "
            "of ssd_jax that wrote the draft, or a newer one, or make the draft again"
        )
    try:
        target, ids = said["target"], said["output_ids"]
        about = _About(str(target["source"]), str(target["sha256"]), dict(said["tied"]), ids)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{where}: {KEY} is malformed ({type(error).__name__}: {error}); write the draft again"
        ) from None
    return about


def _require_tied(about: _About, target: Target, where: str) -> None:
    tensors = target.checkpoint.tensors.names()
    for own, name in about.tied.items():
        if name in tensors:
            continue
        near = difflib.get_close_matches(name, tensors, n=1)
        raise InputError(
            f"{where}: {own!r} is to be {name!r} of the target, but {target.checkpoint.source} "
            f"has no such tensor{f' (nearest: {near[0]!r})' if near else ''}; give the target that "
            f"the draft was made for, {about.source}, or make a draft for this one"
        )


def _require_identity(about: _About, target: Target, path: Path) -> None:
    found = identity_of(target, about.tied)
    if found.sha256 != about.sha256:
        raise InputError(
            f"{path} is a draft for another target: it was made for {about.source} "
            f"(sha256 {about.sha256}), {found.source} has sha256 {found.sha256}; give the target "
            "that it was made for, or make a draft for this one"
        )
