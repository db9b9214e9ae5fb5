"""Opening a checkpoint of any format."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ssd_jax.checkpoints.checkpoint import Checkpoint
from ssd_jax.checkpoints.drafts.checkpoint import CONFIG, KEY
from ssd_jax.checkpoints.drafts.source import is_int8_draft, open_draft
from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.checkpoints.orbax import MANIFEST, OrbaxDirectory
from ssd_jax.checkpoints.quantized.registry import scheme_of
from ssd_jax.checkpoints.quantized.tensors import QuantizedTensors
from ssd_jax.checkpoints.sources import resolve
from ssd_jax.checkpoints.tokenizers.gguf import tokenizer_from_gguf
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.checkpoints.weights.layout import arranged
from ssd_jax.checkpoints.weights.load import check_size
from ssd_jax.checkpoints.weights.native import has_groups, has_native
from ssd_jax.checkpoints.weights.places import check_places, check_tied
from ssd_jax.checkpoints.weights.safetensors import SafetensorsDirectory
from ssd_jax.checkpoints.weights.tensors import Progress, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.registry import FAMILIES
from ssd_jax.system.files import read_json, reading

_MODELOPT = "hf_quant_config.json"


def open_checkpoint(
    source: str, *, target: Checkpoint | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Opens a GGUF file, a Hugging Face directory, one of `ssd-jax convert`, or a draft's.

    Args:
      source: see `sources.resolve`.
      target: a draft's target: a draft checkpoint takes tensors from it (`drafts.checkpoint`), and
        is not a model without it. Others ignore it.
      progress: called while weights are downloaded.

    Raises:
      InputError: the source is not available, incomplete or damaged, or the model is not supported.
    """
    path = resolve(source, progress=progress)
    with reading(path):
        return _open(source, path, target)


def dtype_of_draft(
    source: str, dtype: str, *, platform: str | None, progress: Progress | None = None
) -> str:
    """The default dtype that a draft computes in.

    It is the target's, except int8 if that is `native` and the draft is not quantised in a way that
    products read as it is. On a processor, a draft checkpoint whose
    matrices are int8 computes in w8a8 unless its target computes in float32: acceptance hardly
    differs, and less is read and multiplied.

    Args:
      source: source of the draft.
      dtype: dtype of the target.
      platform: of the draft's devices, as JAX names it; None if it is not known.
      progress: called while the draft is downloaded.

    Raises:
      InputError: see `open_checkpoint`; only headers are read.
    """
    if dtype == "float32" or (dtype != "native" and platform != "cpu"):
        return dtype
    path = resolve(source, progress=progress)
    with reading(path):
        if platform == "cpu" and is_int8_draft(path):
            return "w8a8"
        if dtype != "native":
            return dtype
        tensors = _quantised_tensors(source, path)
        as_stored = has_native if platform in ("cpu", None) else has_groups
        return dtype if tensors is not None and as_stored(tensors) else "int8"


def _quantised_tensors(source: str, path: Path) -> TensorSource | None:
    """The tensors of a checkpoint that may be quantised: a GGUF file, or one that says so."""
    file = _gguf_file(path)
    if file is not None:
        return GGUFFile(file)
    where = path / CONFIG
    quantised = where.exists() and _quantization(read_json(where), path) is not None
    return _open(source, path, None).tensors if quantised else None


def _open(source: str, path: Path, target: Checkpoint | None) -> Checkpoint:
    file = _gguf_file(path)
    if file is not None:
        gguf = GGUFFile(file)
        tokenizer = functools.partial(tokenizer_from_gguf, gguf.metadata, where=str(file))
        return _checkpoint(source, file, gguf.config, gguf, tokenizer)
    converted, where = (path / MANIFEST).exists(), path / CONFIG
    if not converted and not where.exists():
        present = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise InputError(
            f"{path} is not a checkpoint: expected {MANIFEST}, {CONFIG} with safetensors, or a "
            f".gguf file; found {present}"
        )
    config = read_json(where)
    if KEY in config and not converted:
        return open_draft(source, path, config, target)
    model_config = ModelConfig.from_hf(config, source=str(where))
    quantization = _quantization(config, path)
    if converted:
        tensors: TensorSource = OrbaxDirectory(path)
    else:
        tensors = SafetensorsDirectory(path)
        if quantization is None:
            for name in tensors.shapes:
                if name.endswith("weight"):
                    tensors.shape(name)  # refuses integers, before their scales have no place
        else:
            scheme = scheme_of(quantization, where=str(where))
            tensors = QuantizedTensors(tensors, scheme, where=str(path))
        layout = FAMILIES[model_config.family].layout
        tensors = arranged(tensors, model_config, layout, where=str(path))
    check_places(tensors, model_config, str(path))
    check_tied(tensors, model_config, str(path))
    return _checkpoint(
        source, path, model_config, tensors, functools.partial(tokenizer_from_directory, path)
    )


def _quantization(config: Mapping[str, Any], path: Path) -> Any:
    """How a directory's matrices are quantised, from config.json or the file that modelopt may
    write beside it; None if they are not."""
    beside = path / _MODELOPT
    if config.get("quantization_config") is None and beside.exists():
        settings = read_json(beside).get("quantization")
        return {"quant_method": "modelopt", **settings} if isinstance(settings, dict) else settings
    return config.get("quantization_config")


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that a resolved source is or contains; None for other formats."""
    if not path.is_dir():
        return path
    has_safetensors = (path / CONFIG).exists() and any(path.glob("*.safetensors*"))
    if has_safetensors or (path / MANIFEST).exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise InputError(f"{path} has {len(files)} GGUF files ({names}); name one of them")
    return files[0] if files else None


def _checkpoint(
    source: str,
    path: Path,
    config: ModelConfig,
    tensors: TensorSource,
    load_tokenizer: Callable[[], Tokenizer],
) -> Checkpoint:
    check_size(tensors, config, str(path))
    return Checkpoint(
        source=source, path=path, config=config, tensors=tensors, load_tokenizer=load_tokenizer
    )
