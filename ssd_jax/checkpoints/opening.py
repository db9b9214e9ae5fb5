"""Opening a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_jax.checkpoints.checkpoint import Checkpoint, fitting
from ssd_jax.checkpoints.draft_checkpoint import KEY
from ssd_jax.checkpoints.load import check_size
from ssd_jax.checkpoints.orbax import MANIFEST, OrbaxDirectory
from ssd_jax.checkpoints.sources import resolve
from ssd_jax.checkpoints.tensors import Progress, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import read_json, reading, shown

if TYPE_CHECKING:
    from ssd_jax.checkpoints.draft_checkpoint import DraftTarget
    from ssd_jax.checkpoints.tokenizer import Tokenizer

_CONFIG = "config.json"


def open_checkpoint(
    source: str, *, target: DraftTarget | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Opens a GGUF file, a Hugging Face directory, one that `ssd-jax convert` wrote, or a draft's.

    Args:
      source: see `sources.resolve`.
      target: of a draft: a draft checkpoint takes tensors from it (`draft_checkpoint`), and is no
        model without it. Others ignore it.
      progress: called while weights are downloaded.

    Raises:
      InputError: the source cannot be had, is incomplete or damaged, or is a model that is not
        supported.
    """
    path = resolve(source, progress=progress)
    with reading(path):
        return _open(source, path, target)


def _open(source: str, path: Path, target: DraftTarget | None) -> Checkpoint:
    if not path.is_dir():
        return _open_gguf(source, path)
    if (path / MANIFEST).exists():
        return _open_directory(source, path, read_json(path / _CONFIG), OrbaxDirectory)
    if (path / _CONFIG).exists():
        config = read_json(path / _CONFIG)
        if KEY in config:
            from ssd_jax.checkpoints.draft_source import open_draft

            return open_draft(source, path, config, target)
        from ssd_jax.checkpoints.safetensors import SafetensorsDirectory

        return _open_directory(source, path, config, SafetensorsDirectory)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _open_gguf(source, files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise InputError(f"{path} has {len(files)} GGUF files ({names}); name one of them")
    present = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
    raise InputError(
        f"{path} is not a checkpoint: expected {MANIFEST}, {_CONFIG} with safetensors, or a .gguf "
        f"file; found {present}"
    )


def _open_gguf(source: str, path: Path) -> Checkpoint:
    from ssd_jax.checkpoints.gguf import GGUFFile

    file = GGUFFile(path)
    check_size(file, file.config, str(path))

    def load_tokenizer() -> Tokenizer:
        from ssd_jax.checkpoints.tokenizer_gguf import tokenizer_from_gguf

        return fitting(tokenizer_from_gguf(file.metadata, where=str(path)), file.config, path)

    return Checkpoint(
        source=source, path=path, config=file.config, tensors=file, load_tokenizer=load_tokenizer
    )


def _open_directory(
    source: str,
    path: Path,
    config: Mapping[str, Any],
    tensors: Callable[[Path], TensorSource],
) -> Checkpoint:
    if "quantization_config" in config:
        about = config["quantization_config"]
        method = about.get("quant_method") if isinstance(about, dict) else about
        raise InputError(
            f"{path / _CONFIG}: quantised with {shown(method)}, which is not supported; use the "
            "unquantised model, or a GGUF file"
        )

    def load_tokenizer() -> Tokenizer:
        from ssd_jax.checkpoints.tokenizer_hf import tokenizer_from_directory

        with reading(path):
            return fitting(tokenizer_from_directory(path), shape, path)

    shape = ModelConfig.from_hf(config, where=str(path / _CONFIG))
    stored = tensors(path)
    check_size(stored, shape, str(path))
    return Checkpoint(
        source=source,
        path=path,
        config=shape,
        tensors=stored,
        load_tokenizer=load_tokenizer,
    )
