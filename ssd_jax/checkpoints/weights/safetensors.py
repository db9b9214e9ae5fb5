"""Hugging Face directories of safetensors files as a `TensorSource`: memory-mapped, sliced."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # also gives NumPy bfloat16, which safetensors asks for by name
import numpy as np
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.system.files import (
    GET_AGAIN,
    brief,
    open_regular,
    read_json,
    require_plain_name,
    shown,
)

SINGLE = "model.safetensors"
SHARDED = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
"""Types of tensors that are not quantised."""
_FLOAT8 = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
"""Types that safetensors does not give to NumPy."""


class SafetensorsDirectory(TensorSource):
    """The tensors of `model.safetensors`, or of the shards its index names.

    Raises:
      InputError: there are no safetensors, a shard is missing, cut off or damaged, or the index
        names a tensor that its shard does not hold.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        single, index = directory / SINGLE, directory / SHARDED
        self._shards: dict[str, Any]  # opened shard by tensor name
        self._files: dict[str, Path]  # and its file
        # Of files that safetensors does not wholly read: where data begins, and what it is.
        self._headers: dict[Path, tuple[int, dict[str, Any]]] = {}
        if single.exists():  # an index beside it belongs to earlier shards
            shard = open_file(single)
            self._shards = dict.fromkeys(shard.keys(), shard)
            self._files = dict.fromkeys(shard.keys(), single)
        elif index.exists():
            self._shards, self._files = _open_shards(index)
        else:
            present = ", ".join(sorted(p.name for p in directory.iterdir() if p.is_file()))
            raise InputError(
                f"{directory} has neither {SINGLE} nor {SHARDED} (it has: {present}); other "
                "formats, such as pytorch_model.bin, have to be converted to safetensors"
            )

        self.shapes = {
            name: tuple(shard.get_slice(name).get_shape()) for name, shard in self._shards.items()
        }

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        kind = self.kind(name)
        if kind not in FLOATS:
            raise InputError(
                f"{self._directory}: tensor {name!r} has type {kind}, which is not supported; "
                f"supported: {', '.join(FLOATS)}, and others where config.json has the "
                "quantization_config that says what they are"
            )
        return super().shape(name)

    def kind(self, name: str) -> str:
        """The type of a tensor, as safetensors names it."""
        return self._shards[name].get_slice(name).get_dtype()

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        return self._shards[name].get_slice(name)[part]

    def read_stored(self, name: str, index: Index = ()) -> np.ndarray:
        """One tensor of any type, or a part of it.

        The array of a type that safetensors does not give to NumPy is a view of the file.
        """
        shard = self._shards[name]
        dtype = _FLOAT8.get(self.kind(name))
        if dtype is not None:
            return self._mapped(name).view(dtype)[index]
        return shard.get_slice(name)[index] if index else shard.get_tensor(name)

    def _mapped(self, name: str) -> np.ndarray:
        """A tensor of one-byte entries; safetensors has found the file's header sound."""
        file = self._files[name]
        if file not in self._headers:
            with open_regular(file) as opened:
                size = int.from_bytes(opened.read(8), "little")
                self._headers[file] = 8 + size, json.loads(opened.read(size))
        begin, entries = self._headers[file]
        entry = entries[name]
        offset = begin + entry["data_offsets"][0]
        return np.memmap(file, np.uint8, "r", offset, tuple(entry["shape"]))


def _open_shards(index: Path) -> tuple[dict[str, Any], dict[str, Path]]:
    """Opened shard by tensor name, and its file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{index} has no weight_map; get the file again")
    files = {require_plain_name(file, index) for file in weight_map.values()}
    shards = {file: open_file(index.parent / file) for file in sorted(files)}
    names = {file: frozenset(shard.keys()) for file, shard in shards.items()}
    for name, file in weight_map.items():
        if name not in names[file]:
            raise InputError(
                f"{index} says that {file} holds tensor {shown(name)}, but it does not; the index "
                "and the shards are not from the same checkpoint: get both again"
            )
    paths = {name: index.parent / file for name, file in weight_map.items()}
    return {name: shards[file] for name, file in weight_map.items()}, paths


def open_file(path: Path) -> Any:
    """An opened safetensors file, its header checked.

    Raises:
      InputError: the file is missing, unreadable, cut off or damaged.
    """
    if not path.exists():
        raise InputError(f"{path} is missing; the checkpoint is incomplete: {GET_AGAIN}")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} ({size} bytes) is not a whole safetensors file: {brief(error)}; it is "
            f"truncated or damaged: {GET_AGAIN}"
        ) from None
