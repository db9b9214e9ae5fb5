"""The shape of a model, from its configuration alone."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.checkpoints.drafts.checkpoint import KEY
from ssd_jax.checkpoints.gguf.source import GGUFFile
from ssd_jax.checkpoints.sources import resolve_configuration
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import read_json, reading
from ssd_jax.system.paths import user_path

_CONFIG = "config.json"
_PADDING = 0.01  # of a vocabulary: sizes in a family differ by that much


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """The package's configurations of well-known models, by name."""
    return tomllib.loads(Path(__file__).with_name("known.toml").read_text(encoding="utf-8"))


def read_configuration(source: str) -> ModelConfig:
    """The shape of a model.

    Args:
      source: one of `known_models`; a config.json, or a directory that has one; a GGUF file, of
        which the header is read; or `hf:org/name[@revision]`, whose config.json is fetched.

    Raises:
      InputError: there is no such configuration, it cannot be read, or it is of a model that is not
        supported.
    """
    table = known_models()
    if source.lower() in table:
        return ModelConfig.from_hf(table[source.lower()], source=source)
    if ":" not in source and "/" not in source and not user_path(source).exists():
        near = difflib.get_close_matches(source.lower(), table, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InputError(
            f"{source!r} is neither a file or directory nor one of {', '.join(table)}{hint}; give "
            "one of these, a config.json, a GGUF file, or hf:org/name"
        )
    path = resolve_configuration(source)
    with reading(path):
        if path.is_dir():
            path = path / _CONFIG
            if not path.exists():
                raise InputError(f"{path} does not exist; give a directory with a {_CONFIG}")
        if path.suffix == ".gguf":
            return GGUFFile(path).config
        config = read_json(path, remedy="give a config.json, or a GGUF file, whose name ends so")
    if KEY in config:
        raise InputError(
            f"{path} is of a draft that was made for its target, and without its tensors says not "
            "how many words it knows; give the configuration of a whole model"
        )
    return ModelConfig.from_hf(config, source=str(path))


def require_same_words(target: str, of: ModelConfig, draft: str, other: ModelConfig) -> None:
    """Refuses a pair whose vocabularies differ by more than padding.

    There are no tokenizers to compare.

    Raises:
      InputError: they differ by more.
    """
    if abs(of.vocab_size - other.vocab_size) > _PADDING * of.vocab_size:
        raise InputError(
            f"the draft {draft} has {other.vocab_size} words and the target {target} "
            f"{of.vocab_size}: they exchange token ids, and cannot; give a draft with the target's "
            "tokenizer"
        )
