"""GGUF files as a `TensorSource`: memory-mapped, dequantised row by row on demand."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.gguf_config import model_config
from ssd_jax.checkpoints.gguf_header import Header, TensorInfo, read_header
from ssd_jax.checkpoints.places import has_place, no_place
from ssd_jax.checkpoints.tensors import Index, TensorSource, bounds
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.kinds import STORED_KINDS
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import GET_AGAIN, reading, shown

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
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"
_INTERLEAVED = re.compile(r".*\.self_attn\.([qk])_proj\.weight")
_UNQUANTISED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SUPPORTED = (*_UNQUANTISED, *STORED_KINDS)
"""Storage types, by ggml's names."""
_CONVERTED_ROW = 16384
"""Values passed to gguf as one row. It converts 16 rows at a time; with pieces larger than a
model's rows, NumPy runs long enough without the interpreter lock for two threads to pay off."""
_CONVERTED_ROWS = 16
"""Pieces a call; gguf holds the result of a call twice."""


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
        self._path = path
        self.metadata = header.metadata
        parts = header.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise InputError(
                f"{path} is one of {shown(parts)} parts; join them with llama.cpp's "
                "`llama-gguf-split --merge`"
            )
        self._types = {info.name: _storage_type(info, path) for info in header.tensors.values()}
        self._require_complete(header.tensors)
        with reading(path):
            self._bytes = np.memmap(path, mode="r").view(np.ndarray)
        self.config = model_config(header, self._rope_divisors(header), where=str(path))
        self._infos: dict[str, TensorInfo] = {}
        for name, info in header.tensors.items():
            if name == _ROPE_DIVISORS and self.config.family == "llama":
                continue
            hf_name = _hf_name(name, self.config, path)
            if hf_name in self._infos:
                raise InputError(f"{path}: tensor {hf_name!r} is there twice; {GET_AGAIN}")
            self._infos[hf_name] = info
        self.shapes = {name: info.shape for name, info in self._infos.items()}

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        """The part, of which only the rows and blocks that it touches are converted.

        Returns: float32, or float16 and bfloat16 as stored.
        """
        info = self._infos[name]
        order = self._row_order(name)
        if order is None:
            return self._values(info, part)
        rows, *columns = part
        if columns:
            return self._values(info, (order[rows], *columns))
        return self._values(info, (slice(0, info.shape[0]),))[order[rows]]

    @override
    def stored_type(self, name: str) -> str:
        return self._types[self._infos[name].name].name

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "out row_bytes"]:
        stored, order = self._tensor_bytes(self._infos[name]), self._row_order(name)
        return stored if order is None else stored[order]

    def _tensor_bytes(self, info: TensorInfo) -> UInt8[np.ndarray, "*rows row_bytes"]:
        """The bytes of a tensor, in the file's order of rows."""
        row_bytes = self._types[info.name].row_bytes(info.shape[-1])
        size = math.prod(info.shape[:-1]) * row_bytes
        return self._bytes[info.offset : info.offset + size].reshape(*info.shape[:-1], row_bytes)

    def _values(self, info: TensorInfo, part: tuple[slice | np.ndarray, ...]) -> np.ndarray:
        """The numbers that `part` selects: a slice of the last axis, any index of the others."""
        kind = self._types[info.name]
        *rows, columns = part
        assert isinstance(columns, slice)
        first, last = columns.start // kind.block, math.ceil(columns.stop / kind.block)
        blocks = slice(first * kind.block_bytes, last * kind.block_bytes)
        values = kind.to_float(self._tensor_bytes(info)[(*rows, blocks)])
        skip = first * kind.block
        return values[..., columns.start - skip : columns.stop - skip]

    def _rope_divisors(self, header: Header) -> np.ndarray | None:
        info = header.tensors.get(_ROPE_DIVISORS)
        if info is None:
            return None
        divisors = self._values(info, bounds(None, info.shape)) if len(info.shape) == 1 else None
        if divisors is None or not np.all(np.isfinite(divisors) & (divisors > 0)):
            raise InputError(
                f"{self._path}: tensor {_ROPE_DIVISORS!r} of shape {info.shape} is no list of "
                f"positive numbers; {GET_AGAIN}"
            )
        return divisors

    def _row_order(self, name: str) -> np.ndarray | None:
        """The stored row of each row of the tensor, [out]; None if the order is the same.

        llama.cpp's converter interleaves the two halves of every q and k head of the `llama`
        architecture, because its RoPE rotates neighbours there; other architectures keep the order.
        """
        match = _INTERLEAVED.fullmatch(name) if self.config.family == "llama" else None
        if match is None:
            return None
        heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
        rows = np.arange(self.shape(name)[0])
        if rows.size % (2 * heads):
            raise InputError(
                f"{self._path}: tensor {name!r} has {rows.size} rows, which do not divide into "
                f"{heads} heads; {GET_AGAIN}"
            )
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _require_complete(self, infos: Mapping[str, TensorInfo]) -> None:
        end = 0
        for info in infos.values():
            kind = self._types[info.name]
            if info.shape[-1] % kind.block:
                raise InputError(
                    f"{self._path}: tensor {info.name!r} of shape {info.shape} does not divide "
                    f"into {kind.name} blocks of {kind.block}; the file is malformed"
                )
            size = math.prod(info.shape[:-1]) * kind.row_bytes(info.shape[-1])
            end = max(end, info.offset + size)
        file_size = self._path.stat().st_size
        if end > file_size:
            raise InputError(
                f"{self._path} is truncated: its tensors need {end} bytes, the file has "
                f"{file_size}; get the file again"
            )


@dataclasses.dataclass(frozen=True)
class _StorageType:
    """A supported type: `block` values are stored in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; `columns` is a multiple of `block`."""
        return columns // self.block * self.block_bytes

    def to_float(self, stored: np.ndarray) -> np.ndarray:
        """Stored rows, [..., row_bytes] uint8, as numbers [..., columns].

        F32, F16 and BF16 keep their type, everything else becomes float32.
        """
        if self.name in _UNQUANTISED:
            return np.array(stored, order="C").view(_UNQUANTISED[self.name])
        import gguf

        blocks = np.ascontiguousarray(stored).reshape(-1, self.block_bytes)
        blocks_per_row = math.gcd(len(blocks), _CONVERTED_ROW // self.block)
        rows = blocks.reshape(-1, blocks_per_row * self.block_bytes)
        values = np.empty((len(rows), blocks_per_row * self.block), np.float32)
        kind = gguf.GGMLQuantizationType[self.name]
        for start in range(0, len(rows), _CONVERTED_ROWS):
            chunk = slice(start, start + _CONVERTED_ROWS)
            values[chunk] = gguf.quants.dequantize(rows[chunk], kind)
        columns = stored.shape[-1] // self.block_bytes * self.block
        return values.reshape(*stored.shape[:-1], columns)


def _storage_type(info: TensorInfo, path: Path) -> _StorageType:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
        name = kind.name
    except ValueError:
        kind, name = None, f"number {info.type_id}"
    if kind is None or name not in SUPPORTED:
        raise InputError(
            f"{path}: tensor {info.name!r} has type {name}, which is not supported; supported: "
            f"{', '.join(SUPPORTED)} (with `dtype='native'` {', '.join(STORED_KINDS)})"
        )
    return _StorageType(name, *gguf.GGML_QUANT_SIZES[kind])


def _hf_name(name: str, config: ModelConfig, path: Path) -> str:
    """Hugging Face's name of a tensor; llama.cpp adds any biases that a file has."""
    match = _NAME.fullmatch(name)
    if match is not None:
        layer, part, kind = match.groups()
        module = (_MODULES if layer is None else _LAYER_MODULES).get(part)
        prefix = "" if layer is None else f"model.layers.{layer}."
        if module is not None and has_place(hf_name := f"{prefix}{module}.{kind}", config):
            return hf_name
    raise no_place(name, str(path))
