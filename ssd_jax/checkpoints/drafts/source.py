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
from typing_extensions import override

from ssd_jax.checkpoints.checkpoint import Checkpoint, tensor_structs
from ssd_jax.checkpoints.drafts.checkpoint import (
    CONFIG,
    HEAD,
    KEY,
    SCALE,
    TENSORS,
    DraftOrigin,
    StoredTensor,
    check_output_ids,
    check_stored,
    identity_of,
)
from ssd_jax.checkpoints.weights.load import check_size, check_tensors
from ssd_jax.checkpoints.weights.safetensors import open_file
from ssd_jax.checkpoints.weights.tensors import Index, TensorSource
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
    origin = DraftOrigin.parse(config[KEY], where)
    if target is None:
        raise InputError(
            f"{source} is a draft made for the target {origin.target.source}, no model of its "
            f"own: give it as the draft (`draft='{source}'`) beside its target "
            f"(`target='{origin.target.source}'`)"
        )
    own_tensors = open_file(path / TENSORS)
    output_ids = None
    if origin.output_ids is not None:
        if origin.output_ids not in own_tensors.keys():  # noqa: SIM118 (no mapping)
            raise InputError(
                f"{path / TENSORS} has no tensor {origin.output_ids!r}, the output ids that "
                f"{where} names; the files do not belong together: get both again"
            )
        output_ids = np.array(own_tensors.get_tensor(origin.output_ids))
    _require_tied(origin, target, where)
    size = None if output_ids is None else output_ids.size
    model_config = ModelConfig.from_hf(config, source=where, output_size=size)
    try:
        check_output_ids(model_config, output_ids, where=str(path), tokenizer=target.tokenizer)
    except InputError as error:
        try:
            check_output_ids(model_config, output_ids, where="")
        except InputError:  # with any target
            raise error from None
        _require_identity(origin, target, path)
        raise
    with _errors_name_targets(origin, target):
        tensors = DraftTensors(own_tensors, origin, target.tensors, output_ids)
        check_size(tensors, model_config, str(path))
    check_stored(model_config, tensors.stored, origin.tied, where=str(path / TENSORS))
    with _errors_name_targets(origin, target):
        check_tensors(tensors, tensor_structs(model_config), str(path))
    _require_identity(origin, target, path)
    return Checkpoint(
        source=source,
        path=path,
        config=model_config,
        tensors=tensors,
        load_tokenizer=lambda: target.tokenizer,
        output_ids=None if output_ids is None else output_ids.astype(np.int32),
        target_digest=origin.target.sha256,
        acceptance=origin.acceptance,
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
    own_tensors = open_file(path / TENSORS)
    types = (own_tensors.get_slice(name).get_dtype() for name in own_tensors.keys())  # noqa: SIM118
    return "I8" in types


class DraftTensors(TensorSource):
    """Own and tied tensors under the draft's names.

    Args:
      own_tensors: opened file of the own tensors.
      output_ids: [N], rows of the target's tensor that make up a tied head.

    Attributes:
      stored: the file's description of the own tensors, scales included; see `check_stored`.
    """

    def __init__(
        self,
        own_tensors: Any,
        origin: DraftOrigin,
        target: TensorSource,
        output_ids: np.ndarray | None,
    ) -> None:
        self._own_tensors, self._tied, self._target = own_tensors, origin.tied, target
        self._ids = output_ids
        self.stored: dict[str, StoredTensor] = {}
        for name in sorted(set(own_tensors.keys()) - {origin.output_ids}):
            header = own_tensors.get_slice(name)
            self.stored[name] = StoredTensor(tuple(header.get_shape()), header.get_dtype())
        self.shapes = {
            name: stored.shape for name, stored in self.stored.items() if not name.endswith(SCALE)
        } | {name: target.shape(target_name) for name, target_name in origin.tied.items()}
        if output_ids is not None and HEAD in origin.tied:
            self.shapes[HEAD] = len(output_ids), *self.shapes[HEAD][1:]

    def digest(self) -> str:
        """SHA-256 of the own tensors, the map of tied tensors and the output ids."""
        digest = hashlib.sha256(json.dumps(sorted(self._tied.items())).encode())
        for name in sorted(self._own_tensors.keys()):
            array = np.ascontiguousarray(self._own_tensors.get_tensor(name))
            digest.update(f"\0{name} {array.dtype} {array.shape}\0".encode())
            digest.update(array.view(np.uint8).data)
        return digest.hexdigest()

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        """The part; float32 if the tensor is stored as int8."""
        if name in self._tied:
            if self._ids is None or name != HEAD:
                return self._target.read(self._tied[name], part)
            return _read_rows(self._target, self._tied[name], self._ids[part[0]], part[1:])
        array = self._own_tensors.get_slice(name)[part]
        if self.stored[name].kind == "I8":
            return array * self._own_tensors.get_slice(name + SCALE)[part[:1]][:, None]
        return array


def _read_rows(target: TensorSource, name: str, ids: np.ndarray, columns: Index) -> np.ndarray:
    """Rows `ids`, ascending, of one of the target's matrices, read block by block."""
    shape = target.shape(name)
    step = max(1, _BLOCK // max(1, shape[1]))
    blocks = [target.read(name, (slice(0, 0), *columns))]
    for start in range(0, shape[0], step):
        block_ids = ids[(ids >= start) & (ids < start + step)]
        if len(block_ids):
            low, high = int(block_ids[0]), int(block_ids[-1]) + 1
            block = target.read(name, (slice(low, high), *columns))
            blocks.append(block[block_ids - low])
    return np.concatenate(blocks)


def _require_tied(origin: DraftOrigin, target: Checkpoint, where: str) -> None:
    tensors = target.tensors.shapes
    for draft_name, name in origin.tied.items():
        if name not in tensors:
            close = difflib.get_close_matches(name, tensors, n=1)
            raise InputError(
                f"{where}: {draft_name!r} is to be {name!r} of the target, but {target.source} "
                f"has no such tensor{f' (nearest: {close[0]!r})' if close else ''}; {origin.remedy}"
            )


@contextlib.contextmanager
def _errors_name_targets(origin: DraftOrigin, target: Checkpoint) -> Iterator[None]:
    """Names both targets in errors: where a tied tensor does not fit, one or the map is wrong."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"{error}; the draft was made for {origin.target.source} (sha256 "
            f"{origin.target.sha256}), and this target is {target.source}: {origin.remedy}"
        ) from None


def _require_identity(origin: DraftOrigin, target: Checkpoint, path: Path) -> None:
    identity = identity_of(target, origin.tied)
    if identity.sha256 != origin.target.sha256:
        raise InputError(
            f"{path} is a draft for another target: it was made for {origin.target.source} "
            f"(sha256 {origin.target.sha256}), {identity.source} has sha256 {identity.sha256}; "
            f"{origin.remedy}"
        )
