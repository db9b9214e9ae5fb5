"""GGUF files as a `TensorSource`, with Hugging Face's names and layouts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from ssd_jax.checkpoints.gguf.config import architecture_of, has_predicting_layers, model_config
from ssd_jax.checkpoints.gguf.header import read_header
from ssd_jax.checkpoints.gguf.tensors import GgufTensors
from ssd_jax.checkpoints.weights.layout import arranged
from ssd_jax.checkpoints.weights.places import has_place, no_place
from ssd_jax.checkpoints.weights.tensors import ForwardedTensors, Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.family import GgufArchitecture
from ssd_jax.models.mechanisms import XIELU_LARGEST, XIELU_SLOPE
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
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LAYER_TENSORS = {
    "exp_probs_b.bias": ("mlp.router", "e_score_correction_bias"),
    "exp_probs_b": ("mlp.router", "e_score_correction_bias"),
    "attn_sinks.weight": ("self_attn", "sinks"),
}
"""Modules and tensors of those that are neither a weight nor a bias of theirs."""
_LAYER = re.compile(r"blk\.(\d+)\.")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?((\w+)(?:\.(weight|bias))?)")


class GGUFFile(ForwardedTensors):
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
        stored = GgufTensors(path, header.tensors)
        _, architecture = architecture_of(header, where=str(path))
        present = stored.shapes.keys() & {*architecture.divisors}
        divisors = {name: _divisors(stored, name, path) for name in present}
        self.config = model_config(header, divisors, where=str(path))
        names = [name for name in stored.shapes if name not in divisors]
        if has_predicting_layers(header):
            names = [name for name in names if _layer(name) < self.config.num_layers]
        renamed = _Renamed(stored, _by_module(names, architecture, self.config, path))
        tensors = arranged(renamed, self.config, architecture.layout, where=str(path))
        if architecture.activations:
            tensors = _WithNumbers(tensors, _xielu(header.metadata, self.config, path))
        super().__init__(tensors)


class _Renamed(ForwardedTensors):
    """Tensors by other names."""

    def __init__(self, stored: TensorSource, names: Mapping[str, str]) -> None:
        super().__init__(stored)
        self._names = names
        self.shapes = {name: stored.shapes[stored_name] for name, stored_name in names.items()}

    @override
    def stored_name(self, name: str) -> str:
        return self._names[name]


class _WithNumbers(ForwardedTensors):
    """Tensors beside arrays that are not in the file."""

    def __init__(self, stored: TensorSource, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__(stored)
        self._arrays = arrays
        self.shapes = {**stored.shapes, **{name: array.shape for name, array in arrays.items()}}

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape if name in self._arrays else super().shape(name)

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        array = self._arrays.get(name)
        return super().read_part(name, part) if array is None else array[part]

    @override
    def stored_type(self, name: str) -> str | None:
        return "F32" if name in self._arrays else super().stored_type(name)


def _xielu(metadata: Mapping[str, Any], config: ModelConfig, path: Path) -> dict[str, np.ndarray]:
    """The parameters of activations, which the header has as a list of every layer's.

    Raises:
      InputError: they are missing, or the decoder lacks those of a constant.
    """
    lists = {}
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        numbers = np.array(metadata.get(f"xielu.{name}", ()), np.float32)
        if numbers.size == 1:
            numbers = np.full(config.num_layers, numbers)
        if numbers.shape != (config.num_layers,):
            raise InputError(
                f"{path}: xielu.{name} has {numbers.size} numbers, and the model "
                f"{config.num_layers} layers; {GET_AGAIN}"
            )
        lists[name] = numbers
    for name, constant in (("beta", XIELU_SLOPE), ("eps", XIELU_LARGEST)):
        if not np.allclose(lists[name], constant, rtol=2**-8):  # that of bfloat16
            raise InputError(f"{path}: xielu.{name} is supported as {constant} alone")
    return {
        f"model.layers.{layer}.mlp.act_fn.{name}": lists[name][layer : layer + 1]
        for layer in range(config.num_layers)
        for name in ("alpha_p", "alpha_n")
    }


def _layer(name: str) -> int:
    """The number of a tensor's layer; -1 outside layers."""
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


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
    names: Iterable[str], architecture: GgufArchitecture, config: ModelConfig, path: Path
) -> dict[str, str]:
    """ggml's names by Hugging Face's; of matrices that hold several, as the layout has them.

    llama.cpp adds any biases that a file has.

    Raises:
      InputError: a tensor has no place in the decoder, or is there twice.
    """
    by_module: dict[str, str] = {}
    places: set[str] = set()
    for name in names:
        prefix, module, kind = _split(name, architecture)
        modules = architecture.layout.modules.get(module, (module,))
        parts = [f"{prefix}{part}.{kind}" for part in modules]
        if not module or not all(has_place(part, config) for part in parts):
            raise no_place(name, str(path))
        if twice := sorted(places.intersection(parts)):
            raise InputError(f"{path}: tensor {twice[0]!r} is there twice; {GET_AGAIN}")
        places.update(parts)
        by_module[f"{prefix}{module}.{kind}"] = name
    return by_module


def _split(name: str, architecture: GgufArchitecture) -> tuple[str, str, str]:
    """Of ggml's name of a tensor, Hugging Face's of its layer and module, and of the tensor there,
    mostly weight or bias; nothing if there is no such module."""
    match = _NAME.fullmatch(name)
    if match is None:
        return "", "", ""
    layer, tensor, part, kind = match.groups()
    if layer is not None and tensor in _LAYER_TENSORS:
        return f"model.layers.{layer}.", *_LAYER_TENSORS[tensor]
    if kind is None:
        return "", "", ""
    if layer is None:
        return "", _MODULES.get(part, ""), kind
    return f"model.layers.{layer}.", {**_LAYER_MODULES, **architecture.modules}.get(part, ""), kind
