"""GGUF files as a `TensorSource`, with Hugging Face's names and layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.gguf_config import family_of, model_config
from ssd_jax.checkpoints.gguf_families import GgufFamily
from ssd_jax.checkpoints.gguf_header import read_header
from ssd_jax.checkpoints.gguf_tensors import GgufTensors
from ssd_jax.checkpoints.grouped import StoredGroups
from ssd_jax.checkpoints.layout import arranged
from ssd_jax.checkpoints.places import has_place, no_place
from ssd_jax.checkpoints.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import GET_AGAIN, shown

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GGUFFile(TensorSource):
    """An opened GGUF file, with Hugging Face's names and layouts.

    Attributes:
      metadata: GGUF keys with plain Python values (tokenizer included).
      config: architecture.

    Raises:
      InputError: the file is not GGUF, cut off or in several parts, or has an architecture, a
        storage type or a tensor that is not supported.
    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.metadata = header.metadata
        parts = header.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise InputError(
                f"{path} is one of {shown(parts)} parts; join them with llama.cpp's "
                "`llama-gguf-split --merge`"
            )
        stored, family = GgufTensors(path, header.tensors), family_of(header, where=str(path))
        divisors = {
            name: _divisors(stored, name, path) for name in family.divisors if name in stored.shapes
        }
        self.config = model_config(header, divisors, where=str(path))
        names = [name for name in stored.shapes if name not in divisors]
        renamed = _Renamed(stored, _by_module(names, family, self.config, path))
        self._tensors = arranged(renamed, self.config, family.layout, where=str(path))
        self.shapes = self._tensors.shapes

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        return self._tensors.read_part(name, part)

    @override
    def stored_type(self, name: str) -> str | None:
        return self._tensors.stored_type(name)

    @override
    def group_form(self, name: str) -> GroupForm | None:
        return self._tensors.group_form(name)

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        return self._tensors.read_groups(name, rows)

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        return self._tensors.read_blocks(name)


class _Renamed(TensorSource):
    """Tensors by other names."""

    def __init__(self, stored: TensorSource, names: Mapping[str, str]) -> None:
        self._stored, self._names = stored, names
        self.shapes = {name: stored.shapes[stored_name] for name, stored_name in names.items()}

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        return self._stored.read_part(self._names[name], part)

    @override
    def stored_type(self, name: str) -> str | None:
        return self._stored.stored_type(self._names[name])

    @override
    def group_form(self, name: str) -> GroupForm | None:
        return self._stored.group_form(self._names[name])

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        return self._stored.read_groups(self._names[name], rows)

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        return self._stored.read_blocks(self._names[name])


def _divisors(stored: TensorSource, name: str, path: Path) -> np.ndarray:
    """The numbers by which frequencies of RoPE are divided, [rotated dimensions / 2]."""
    shape = stored.shapes[name]
    divisors = stored.read(name) if len(shape) == 1 else None
    if divisors is None or not np.all(np.isfinite(divisors) & (divisors > 0)):
        raise InputError(
            f"{path}: tensor {name!r} of shape {shape} is no list of positive numbers; {GET_AGAIN}"
        )
    return divisors


def _by_module(
    names: Iterable[str], family: GgufFamily, config: ModelConfig, path: Path
) -> dict[str, str]:
    """ggml's names by Hugging Face's; of matrices that hold several, as `family.layout` has them.

    llama.cpp adds any biases that a file has.

    Raises:
      InputError: a tensor has no place in the decoder, or is there twice.
    """
    by_module: dict[str, str] = {}
    places: set[str] = set()
    for name in names:
        prefix, module, kind = _split(name, family)
        parts = [f"{prefix}{part}.{kind}" for part in family.layout.modules.get(module, (module,))]
        if not module or not all(has_place(part, config) for part in parts):
            raise no_place(name, str(path))
        if twice := sorted(places.intersection(parts)):
            raise InputError(f"{path}: tensor {twice[0]!r} is there twice; {GET_AGAIN}")
        places.update(parts)
        by_module[f"{prefix}{module}.{kind}"] = name
    return by_module


def _split(name: str, family: GgufFamily) -> tuple[str, str, str]:
    """Of ggml's name of a tensor, Hugging Face's of its layer and module, and weight or bias;
    nothing if there is no such module."""
    match = _NAME.fullmatch(name)
    if match is None:
        return "", "", ""
    layer, part, kind = match.groups()
    if layer is None:
        return "", _MODULES.get(part, ""), kind
    return f"model.layers.{layer}.", {**_LAYER_MODULES, **family.modules}.get(part, ""), kind
