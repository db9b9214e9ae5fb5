"""Reads a draft checkpoint: its own tensors, and the tied ones from the target's source."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ssd_jax.checkpoints.checkpoint import Checkpoint, wanted_of
from ssd_jax.checkpoints.draft_checkpoint import (
    CONFIG,
    HEAD,
    KEY,
    SCALE,
    TENSORS,
    DraftOrigin,
    Stored,
    check_output_ids,
    check_stored,
    identity_of,
)
from ssd_jax.checkpoints.load import check_size, check_tensors
from ssd_jax.checkpoints.safetensors import open_file
from ssd_jax.checkpoints.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import read_json

_BLOCK = 1 << 24
"""Elements of the target's tensor that are read at a time to take rows of it."""


def open_draft(
    source: str, path: Path, config: Mapping[str, Any], target: Checkpoint | None
) -> Checkpoint:
    """Opens a draft over its target; reads headers, output ids and, to check them, tied tensors.

    Args:
      source: as the user named the draft.
      config: content of `config.json` in its directory.

    Raises:
      InputError: there is no target, because the draft was named as a standalone model; the target
        is not the one it was made for; the format version is another; a file or a map is damaged.
    """
    where = str(path / CONFIG)
    about = DraftOrigin.parse(config[KEY], where)
    if target is None:
        raise InputError(
            f"{source} is a draft made for the target {about.target.source}, no model of its own: "
            f"give it as the draft (`draft='{source}'`) beside its target "
            f"(`target='{about.target.source}'`)"
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
    size = None if output_ids is None else output_ids.size
    shape = ModelConfig.from_hf(config, source=where, output_size=size)
    try:
        check_output_ids(shape, output_ids, where=str(path), tokenizer=target.tokenizer)
    except InputError as error:
        try:
            check_output_ids(shape, output_ids, where="")
        except InputError:  # with any target
            raise error from None
        _require_identity(about, target, path)
        raise
    with _naming_targets(about, target):
        tensors = DraftTensors(own, about, target.tensors, output_ids)
        check_size(tensors, shape, str(path))
    check_stored(shape, tensors.stored, about.tied, where=str(path / TENSORS))
    with _naming_targets(about, target):
        check_tensors(tensors, wanted_of(shape), str(path))
    _require_identity(about, target, path)
    return Checkpoint(
        source=source,
        path=path,
        config=shape,
        tensors=tensors,
        load_tokenizer=lambda: target.tokenizer,
        output_ids=None if output_ids is None else output_ids.astype(np.int32),
        made_for=about.target.sha256,
        acceptance=about.acceptance,
        digest=tensors.digest,
    )


def takes_tensors(path: Path) -> bool:
    """Whether a checkpoint is a draft that takes tensors from its target.

    Raises:
      InputError: its configuration is damaged.
    """
    return (path / CONFIG).is_file() and KEY in read_json(path / CONFIG)


def is_int8_draft(path: Path) -> bool:
    """Whether a directory holds a draft checkpoint whose own matrices are int8.

    Raises:
      InputError: one of its files is damaged.
    """
    if not takes_tensors(path):
        return False
    own = open_file(path / TENSORS)
    return any(own.get_slice(name).get_dtype() == "I8" for name in own.keys())  # noqa: SIM118


class DraftTensors(TensorSource):
    """Own and tied tensors under the draft's names.

    Args:
      own: opened file of the own tensors.
      output_ids: [N], rows of the target's tensor that make up a tied head.

    Attributes:
      stored: the file's description of the own tensors, scales included; see `check_stored`.
    """

    def __init__(
        self, own: Any, about: DraftOrigin, target: TensorSource, output_ids: np.ndarray | None
    ) -> None:
        self._own, self._tied, self._target = own, about.tied, target
        self._ids = output_ids
        self.stored: dict[str, Stored] = {}
        for name in sorted(set(own.keys()) - {about.output_ids}):
            header = own.get_slice(name)
            self.stored[name] = Stored(tuple(header.get_shape()), header.get_dtype())
        self.shapes = {
            name: stored.shape for name, stored in self.stored.items() if not name.endswith(SCALE)
        } | {name: target.shape(of) for name, of in about.tied.items()}
        if output_ids is not None and HEAD in about.tied:
            self.shapes[HEAD] = len(output_ids), *self.shapes[HEAD][1:]

    def digest(self) -> str:
        """SHA-256 of the own tensors, the map of tied tensors and the output ids."""
        digest = hashlib.sha256(json.dumps(sorted(self._tied.items())).encode())
        for name in sorted(self._own.keys()):
            array = np.ascontiguousarray(self._own.get_tensor(name))
            digest.update(f"\0{name} {array.dtype} {array.shape}\0".encode())
            digest.update(array.view(np.uint8).data)
        return digest.hexdigest()

    def read_part(self, name: str, part: Index) -> np.ndarray:
        """See `TensorSource.read`; float32 if the tensor is stored as int8."""
        if name in self._tied:
            if self._ids is None or name != HEAD:
                return self._target.read(self._tied[name], part)
            return _rows(self._target, self._tied[name], self._ids[part[0]], part[1:])
        array = self._own.get_slice(name)[part]
        if self.stored[name].kind == "I8":
            return array * self._own.get_slice(name + SCALE)[part[:1]][:, None]
        return array


def _rows(target: TensorSource, name: str, ids: np.ndarray, columns: Index) -> np.ndarray:
    """Rows `ids`, ascending, of one of the target's matrices, read block by block."""
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


def _require_tied(about: DraftOrigin, target: Checkpoint, where: str) -> None:
    tensors = target.tensors.shapes
    for own, name in about.tied.items():
        if name not in tensors:
            near = difflib.get_close_matches(name, tensors, n=1)
            raise InputError(
                f"{where}: {own!r} is to be {name!r} of the target, but {target.source} "
                f"has no such tensor{f' (nearest: {near[0]!r})' if near else ''}; {about.remedy}"
            )


@contextlib.contextmanager
def _naming_targets(about: DraftOrigin, target: Checkpoint) -> Iterator[None]:
    """Names both targets in errors: where a tied tensor does not fit, one or the map is wrong."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error}; the draft was made for {about.target.source} (sha256 "
            f"{about.target.sha256}), and this target is {target.source}: {about.remedy}"
        ) from None


def _require_identity(about: DraftOrigin, target: Checkpoint, path: Path) -> None:
    found = identity_of(target, about.tied)
    if found.sha256 != about.target.sha256:
        raise InputError(
            f"{path} is a draft for another target: it was made for {about.target.source} (sha256 "
            f"{about.target.sha256}), {found.source} has sha256 {found.sha256}; {about.remedy}"
        )
