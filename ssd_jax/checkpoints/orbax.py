"""Our own checkpoints: a directory that loads fast and is whole or absent.

  config.json       architecture, as Hugging Face spells it
  tokenizer files   as `Tokenizer.save` writes them
  arrays/           an orbax checkpoint: one flat dictionary of arrays by Hugging Face name
  ssd_jax.json      format version, origin, shapes and types, sizes of the files in arrays/

Orbax writes `arrays/`. It is read with the TensorStore library that orbax is built on, since
orbax's own restore has no slices and takes half a second to import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ssd_jax.atomic import new_directory
from ssd_jax.checkpoints.config_json import to_hf
from ssd_jax.checkpoints.tensors import Index, bounds
from ssd_jax.errors import InputError
from ssd_jax.files import brief, read_json, require_plain_name, sha256_of, shown

if TYPE_CHECKING:
    from ssd_jax.checkpoints.checkpoint import Checkpoint
    from ssd_jax.checkpoints.progress import Progress

MANIFEST = "ssd_jax.json"
_ARRAYS = "arrays"
_FORMAT = 1
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_CHUNK_BYTES = 16 << 20
"""Pieces that an array is stored in: small enough that a slice does not read the whole array."""


class OrbaxDirectory:
    """The arrays of our own checkpoint; a `TensorSource`.

    Raises:
      InputError: another format version, or files that are missing or cut off.
    """

    def __init__(self, directory: Path) -> None:
        self._arrays = directory / _ARRAYS
        manifest = read_json(directory / MANIFEST)
        if manifest.get("format") != _FORMAT:
            raise InputError(
                f"{directory / MANIFEST}: format {shown(manifest.get('format'))} is not supported, "
                f"this version reads {_FORMAT}; write the checkpoint again with `ssd-jax convert`"
            )
        self._shapes = _shapes(manifest, directory / MANIFEST)
        for name, size in _sizes(manifest, directory / MANIFEST).items():
            path = self._arrays / name
            found = path.stat().st_size if path.is_file() else 0
            if found != size:
                raise InputError(
                    f"{path} has {found} bytes, expected {size}; the checkpoint is damaged: write "
                    "it again with `ssd-jax convert`"
                )

    def names(self) -> frozenset[str]:
        """Names of all arrays."""
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array."""
        return self._shapes[name]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """An array or a part of it; only the chunks that the part touches are read.

        Raises:
          InputError: the stored bytes are damaged.
        """
        import tensorstore

        base = {"driver": "file", "path": f"{self._arrays.absolute()}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        try:
            array = tensorstore.open({"driver": "zarr", "kvstore": store}, read=True).result()
            if tuple(array.shape) != self._shapes[name]:
                raise ValueError(f"its shape is {array.shape}, the manifest has another")
            if array.dtype.numpy_dtype not in DTYPES.values():
                raise ValueError(f"its type is {array.dtype.name}")
            return array[bounds(index, self._shapes[name])].read().result()
        except (ValueError, IndexError, TypeError, NotImplementedError, OSError) as error:
            raise InputError(
                f"{self._arrays}: array {name!r} cannot be read: {brief(error)}; write the "
                "checkpoint again with `ssd-jax convert`"
            ) from None


def _shapes(manifest: Mapping[str, Any], where: Path) -> dict[str, tuple[int, ...]]:
    """Shape by array name.

    Raises:
      InputError: a manifest that says anything else under `tensors`.
    """
    shapes = manifest.get("tensors")
    if isinstance(shapes, dict) and all(
        isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        for shape in shapes.values()
    ):
        return {name: tuple(shape) for name, shape in shapes.items()}
    raise InputError(f"{where} has no shapes of its arrays under 'tensors'; {_REMEDY}")


def _sizes(manifest: Mapping[str, Any], where: Path) -> dict[str, int]:
    """Bytes by file, relative to the arrays' directory.

    Raises:
      InputError: a manifest that says anything else under `store`, or a path that leads elsewhere.
    """
    sizes = manifest.get("store")
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise InputError(f"{where} has no sizes of its files under 'store'; {_REMEDY}")
    for name in sizes:
        for part in name.split("/"):
            require_plain_name(part, where)
    return sizes


_REMEDY = "write the checkpoint again with `ssd-jax convert`"


def write_checkpoint(
    directory: Path, checkpoint: Checkpoint, dtype: str, *, progress: Progress | None = None
) -> None:
    """Writes a checkpoint of any format as our own.

    Everything is written beside `directory` and renamed at the end, so that `directory` never holds
    half a checkpoint. Vectors (norms, biases) are kept in float32, matrices in `dtype`. Host memory
    holds all arrays at once.

    Args:
      directory: to be created; an empty one is replaced.
      checkpoint: what to write.
      dtype: "float32" or "bfloat16".
      progress: called with (bytes read, bytes in all), as stored.

    Raises:
      InputError: the destination holds something, or another dtype.
    """
    if dtype not in DTYPES:
        raise InputError(f"cannot store dtype {dtype!r}; supported: {', '.join(DTYPES)}")
    directory = directory.expanduser().absolute()
    require_free(directory)
    with new_directory(directory) as partial:
        _write(partial, checkpoint, dtype, progress)
        require_free(directory)


def require_free(directory: Path) -> None:
    """Refuses a destination that holds anything.

    Raises:
      InputError: it exists and is not an empty directory.
    """
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists():
        raise InputError(f"{directory} exists and is not empty; remove it or name another one")


def _write(directory: Path, checkpoint: Checkpoint, dtype: str, progress: Progress | None) -> None:
    checkpoint.load_tokenizer().save(directory)
    _write_json(directory / "config.json", to_hf(checkpoint.config) | {"torch_dtype": dtype})
    arrays = _read_all(checkpoint, dtype, progress)
    _save(directory / _ARRAYS, arrays)
    store = (path for path in (directory / _ARRAYS).rglob("*") if path.is_file())
    manifest = {
        "format": _FORMAT,
        "source": checkpoint.source,
        "source_sha256": origin(checkpoint.path),
        "dtype": dtype,
        "tensors": {name: list(array.shape) for name, array in arrays.items()},
        "store": {
            path.relative_to(directory / _ARRAYS).as_posix(): path.stat().st_size
            for path in sorted(store)
        },
    }
    _write_json(directory / MANIFEST, manifest)


def _read_all(
    checkpoint: Checkpoint, dtype: str, progress: Progress | None
) -> dict[str, np.ndarray]:
    tensors = checkpoint.tensors
    names = sorted(tensors.names())
    total = sum(np.prod(tensors.shape(name), dtype=int) for name in names)
    arrays, done = {}, 0
    for name in names:
        stored = DTYPES[dtype if len(tensors.shape(name)) > 1 else "float32"]
        arrays[name] = tensors.read(name).astype(stored, copy=False)
        done += arrays[name].size
        if progress is not None:
            item = DTYPES[dtype].itemsize
            progress(done * item, int(total) * item)
    return arrays


def _save(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    chunks = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(dict(arrays), save_args=chunks))


def origin(path: Path) -> dict[str, str]:
    """SHA-256 of the files that weights came from, by name; our own format passes its on."""
    if path.is_dir() and (path / MANIFEST).exists():
        return read_json(path / MANIFEST).get("source_sha256", {})
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return {file.name: sha256_of(file) for file in sorted(files)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
