"""This package's own checkpoints: a directory that loads fast and is whole or absent.

config.json       architecture, as Hugging Face spells it
tokenizer files   as `Tokenizer.save` writes them
arrays/           an orbax checkpoint: one flat dictionary of arrays by Hugging Face name
ssd_jax.json      format version, origin, shapes and types, sizes of the files in arrays/
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from typing_extensions import override

from ssd_jax.checkpoints.checkpoint import Checkpoint, tensor_structs
from ssd_jax.checkpoints.generation_config import FILE, read_sampling
from ssd_jax.checkpoints.weights.tensors import Index, Progress, TensorSource, bounds
from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.atomic import new_directory
from ssd_jax.system.files import brief, read_json, require_plain_name, sha256_of, shown
from ssd_jax.system.paths import require_free

MANIFEST = "ssd_jax.json"
_ARRAYS = "arrays"
_FORMAT = 1
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_CHUNK_BYTES = 16 << 20
"""Size of the pieces of a stored array, small enough that several are read at once."""
_REMEDY = "write the checkpoint again with `ssd-jax convert`"


class OrbaxDirectory(TensorSource):
    """The arrays of a checkpoint in this package's format.

    Orbax reads whole arrays; each reading thread keeps the array that it last took slices of.

    Raises:
      InputError: the format version is another, or files are missing or cut off.
    """

    def __init__(self, directory: Path) -> None:
        self._arrays = directory / _ARRAYS
        where = directory / MANIFEST
        manifest = read_json(where)
        if manifest.get("format") != _FORMAT:
            raise InputError(
                f"{where}: format {shown(manifest.get('format'))} is not supported, this version "
                f"reads {_FORMAT}; {_REMEDY}"
            )
        self.shapes, files = _manifest_sizes(manifest, where)
        self._restore_cached = functools.lru_cache(maxsize=2)(self._restore)
        for name, size in files.items():
            path = self._arrays / name
            file_size = path.stat().st_size if path.is_file() else 0
            if file_size != size:
                raise InputError(
                    f"{path} has {file_size} bytes, expected {size}; the checkpoint is damaged: "
                    f"{_REMEDY}"
                )

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        """The part; all of an array is not kept, since it will not be asked for again.

        Raises:
          InputError: the stored bytes are damaged.
        """
        if part == bounds(None, self.shapes[name]):
            return self._restore(name)
        return self._restore_cached(name)[part].copy()

    def _restore(self, name: str) -> np.ndarray:
        import orbax.checkpoint as ocp
        from etils import epath  # path type that orbax takes

        args = ocp.args.PyTreeRestore(
            {name: 0},
            restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            handler = ocp.PyTreeCheckpointHandler()
            array = handler.restore(epath.Path(self._arrays.absolute()), args=args)[name]
            if array.shape != self.shapes[name]:
                raise ValueError(f"its shape is {array.shape}, the manifest has another")
            if array.dtype not in DTYPES.values():
                raise ValueError(f"its type is {array.dtype}")
        except (ValueError, LookupError, TypeError, NotImplementedError, OSError) as error:
            raise InputError(
                f"{self._arrays}: array {name!r} cannot be read: {brief(error)}; {_REMEDY}"
            ) from None
        return array


def _manifest_sizes(
    manifest: Mapping[str, Any], where: Path
) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Shape by array name, and bytes by file, relative to the arrays' directory."""
    shapes, sizes = manifest.get("tensors"), manifest.get("store")
    if not isinstance(shapes, dict) or not all(
        isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        for shape in shapes.values()
    ):
        raise InputError(f"{where} has no shapes of its arrays under 'tensors'; {_REMEDY}")
    if not isinstance(sizes, dict) or not all(type(size) is int for size in sizes.values()):
        raise InputError(f"{where} has no sizes of its files under 'store'; {_REMEDY}")
    for name in sizes:
        for part in name.split("/"):
            require_plain_name(part, where)
    return {name: tuple(shape) for name, shape in shapes.items()}, sizes


def write_checkpoint(
    directory: Path, checkpoint: Checkpoint, dtype: str, *, progress: Progress | None = None
) -> None:
    """Writes a checkpoint of any format in this package's, as a whole or not at all.

    Vectors (norms, biases) are stored in float32, matrices in `dtype`. Host memory holds all arrays
    at once.

    Args:
      directory: to be created; an empty one is replaced.
      dtype: "float32" or "bfloat16".
      progress: called with (bytes read, bytes in all), as stored.

    Raises:
      InputError: the destination holds something or has too little room, or dtype is another.
      SsdError: the checkpoint cannot be written.
    """
    if dtype not in DTYPES:
        raise InputError(f"cannot store dtype {dtype!r}; supported: {', '.join(DTYPES)}")
    directory = directory.expanduser().absolute()
    require_free(directory)
    sizes = {
        name: int(np.prod(checkpoint.tensors.shape(name)))
        for name in sorted(tensor_structs(checkpoint.config))
    }
    _, sampling = read_sampling(checkpoint)
    with new_directory(directory) as partial:
        needed, free = sum(sizes.values()) * DTYPES[dtype].itemsize, shutil.disk_usage(partial).free
        if needed > free:
            raise InputError(
                f"{directory} has room for {free:,} bytes, and the arrays may take {needed:,}; "
                "make room there or name another place"
            )
        arrays = _read_all(checkpoint, sizes, dtype, progress)
        manifest = {
            "format": _FORMAT,
            "source": checkpoint.source,
            "source_sha256": origin(checkpoint.path),
            "dtype": dtype,
            "tensors": {name: list(array.shape) for name, array in arrays.items()},
        }
        generation, store = partial / FILE, partial / _ARRAYS
        with _write_errors(directory):
            checkpoint.tokenizer.save(partial)
            if sampling:
                _write_json(generation, read_json(generation) | sampling)
            _write_json(partial / "config.json", checkpoint.config.to_hf() | {"torch_dtype": dtype})
            _save(store, arrays)
            files = sorted(path for path in store.rglob("*") if path.is_file())
            file_sizes = {path.relative_to(store).as_posix(): path.stat().st_size for path in files}
            _write_json(partial / MANIFEST, manifest | {"store": file_sizes})
        require_free(directory)


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    """Raises errors of writing as one message: Orbax also logs what its threads raise."""
    log = logging.getLogger("absl")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    except (OSError, ValueError) as error:  # tensorstore raises the latter
        raise SsdError(
            f"{directory} cannot be written: {brief(error, end=True)}; make room there or name "
            "another place"
        ) from error
    finally:
        log.disabled = disabled


def _read_all(
    checkpoint: Checkpoint, sizes: Mapping[str, int], dtype: str, progress: Progress | None
) -> dict[str, np.ndarray]:
    tensors, arrays, elements_read, itemsize = checkpoint.tensors, {}, 0, DTYPES[dtype].itemsize
    for name, size in sizes.items():
        stored_dtype = DTYPES[dtype if len(tensors.shape(name)) > 1 else "float32"]
        arrays[name] = tensors.read(name).astype(stored_dtype, copy=False)
        elements_read += size
        if progress is not None:
            progress(elements_read * itemsize, sum(sizes.values()) * itemsize)
    return arrays


def _save(directory: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    chunks = dict.fromkeys(arrays, ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=False)) as checkpointer:
        checkpointer.save(directory, args=ocp.args.PyTreeSave(dict(arrays), save_args=chunks))


def origin(path: Path) -> dict[str, str]:
    """SHA-256 of the files that weights came from, by name; this package's format keeps them."""
    if path.is_dir() and (path / MANIFEST).exists():
        return read_json(path / MANIFEST).get("source_sha256", {})
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return {file.name: sha256_of(file) for file in sorted(files)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
