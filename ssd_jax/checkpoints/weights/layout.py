"""Tensors of families whose files name or arrange them otherwise than this package."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.joined_experts import JoinedExperts
from ssd_jax.checkpoints.weights.single_rows import SingleRows
from ssd_jax.checkpoints.weights.tensors import ForwardedTensors, Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.family import TensorLayout
from ssd_jax.system.files import GET_AGAIN

_IN_LAYER = re.compile(
    r"(model\.layers\.\d+\.)(.+)\.(weight|bias|e_score_correction_bias|expert_bias)"
)
_OTHER_KINDS = {"expert_bias": "e_score_correction_bias"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_ROTATED = re.compile(r".*\.self_attn\.[qk](_proj|_norm)\.(weight|bias)")
_NORM_OF_HEADS = re.compile(r".*\.self_attn\.[qk]_norm\.weight")


def arranged(
    tensors: TensorSource, config: ModelConfig, layout: TensorLayout, *, where: str
) -> TensorSource:
    """The tensors by this package's names and rows; themselves if the layout is no other.

    Raises:
      InputError: a matrix that holds several has another number of rows than these together, one
        of an expert is missing or of another shape than those of others, or a constant is another.
    """
    if layout.prefixes:
        tensors = _WithoutPrefixes(tensors, layout.prefixes)
    if layout.expert_arrays is not None:
        tensors = JoinedExperts(tensors, layout.expert_arrays, where=where)
    if layout != TensorLayout():
        tensors = _Arranged(tensors, config, layout, where)
    return SingleRows(tensors, layout.axes) if layout.axes else tensors


class _WithoutPrefixes(ForwardedTensors):
    """Tensors by names whose beginnings are others."""

    def __init__(self, stored: TensorSource, prefixes: Mapping[str, str]) -> None:
        super().__init__(stored)
        self._names = {_replaced(name, prefixes): name for name in stored.shapes}
        self.shapes = {
            name: stored.shapes[stored_name] for name, stored_name in self._names.items()
        }

    @override
    def stored_name(self, name: str) -> str:
        return self._names[name]


def _replaced(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, instead in prefixes.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


class _Part(NamedTuple):
    """Rows of a stored tensor."""

    name: str
    start: int
    rows: int


class _Arranged(TensorSource):
    def __init__(
        self, stored: TensorSource, config: ModelConfig, layout: TensorLayout, where: str
    ) -> None:
        self._stored, self._layout, self._where = stored, layout, where
        size, m = config.head_dim, config.mechanisms
        self._head_order = _head_order(size, m.rotary_dim or size)
        self._rows = {
            "self_attn.q_proj": config.num_heads * size,
            "self_attn.k_proj": config.num_kv_heads * size,
            "self_attn.v_proj": config.num_kv_heads * size,
            "mlp.gate_proj": config.intermediate_size,
            "mlp.up_proj": config.intermediate_size,
        }
        names = self._names()
        self._experts = self._joined_experts(names) if layout.experts else {}
        of_experts = {name for names in self._experts.values() for name in names}
        self._parts = {
            tensor: part
            for name in names
            if name not in of_experts
            for tensor, part in self._parts_of(name)
        }
        self.shapes = {
            name: (part.rows, *stored.shapes[part.name][1:]) for name, part in self._parts.items()
        }
        for name, experts in self._experts.items():
            self.shapes[name] = len(experts), *stored.shapes[experts[0]]

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._experts:
            first, *_ = map(self._stored.shape, self._experts[name])
            return len(self._experts[name]), *first
        part = self._parts[name]
        return part.rows, *self._stored.shape(part.name)[1:]

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        """The part; of norms whose weights get an offset, float32."""
        if name in self._experts:
            experts, *rest = part
            matrices = [
                self._stored.read(expert, tuple(rest)) for expert in self._experts[name][experts]
            ]
            return np.stack(matrices)
        if self._layout.rotates_neighbours and _ROTATED.fullmatch(name):
            if len(part) == 2 and _NORM_OF_HEADS.fullmatch(name):
                return self._read_norms(name, part)
            return self._read_heads(name, part)
        values = self._read_rows(name, part)
        if self._layout.norm_offset and name.endswith("norm.weight"):
            return values.astype(np.float32) + np.float32(self._layout.norm_offset)
        return values

    @override
    def stored_type(self, name: str) -> str | None:
        if name not in self._experts:
            return self._stored.stored_type(self._parts[name].name)
        kinds = {self._stored.stored_type(expert) for expert in self._experts[name]}
        return kinds.pop() if len(kinds) == 1 else " and ".join(sorted(map(str, kinds)))

    @override
    def group_form(self, name: str) -> GroupForm | None:
        if name not in self._experts:
            return self._stored.group_form(self._parts[name].name)
        forms = map(self._stored.group_form, self._experts[name])
        return functools.reduce(lambda one, other: one and other and one.joined(other), forms)

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        stored = self._parts[name]

        def read(rows: slice) -> StoredGroups:
            shifted = slice(rows.start + stored.start, rows.stop + stored.start)
            return self._stored.read_groups(stored.name, shifted)

        if not (self._layout.rotates_neighbours and _ROTATED.fullmatch(name)):
            return read(rows)
        all_rows, within = self._heads(rows)
        return read(all_rows).changed(lambda array: self._by_halves(array)[within])

    @override
    def read_expert_groups(self, name: str, expert: int, rows: slice) -> StoredGroups:
        if name in self._experts:
            return self._stored.read_groups(self._experts[name][expert], rows)
        return self._stored.read_expert_groups(self._parts[name].name, expert, rows)

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        if name in self._experts:
            return np.stack([self._stored.read_blocks(expert) for expert in self._experts[name]])
        part = self._parts[name]
        blocks = self._stored.read_blocks(part.name)[part.start : part.start + part.rows]
        if self._layout.rotates_neighbours and _ROTATED.fullmatch(name):
            return self._by_halves(blocks)
        return blocks

    @override
    def read_expert_blocks(
        self, name: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        if name in self._experts:
            return self._stored.read_blocks(self._experts[name][expert])[rows]
        return self._stored.read_expert_blocks(self._parts[name].name, expert, rows)

    def _names(self) -> list[str]:
        """Stored names, but those of layers that are left out, and of constants."""
        end = f"{self._layout.left_out}.weight"
        left_out = tuple(
            name.removesuffix(end)
            for name in self._stored.shapes
            if self._layout.left_out and name.endswith(f".{end}")
        )
        read = [name for name in self._stored.shapes if not name.startswith(left_out)]
        return [name for name in read if not self._is_constant(name)]

    def _is_constant(self, name: str) -> bool:
        """Whether a tensor is a number that the decoder has as a constant.

        Raises:
          InputError: it is another number.
        """
        ends = self._layout.constants
        constant = next((ends[end] for end in ends if name.endswith(f".{end}")), None)
        if constant is None:
            return False
        found = self._stored.read(name).astype(np.float32)
        if found.size != 1 or not np.allclose(found, constant, rtol=2**-8):  # that of bfloat16
            raise InputError(
                f"{self._where}: tensor {name!r} is {found.tolist()}, and only {constant} is "
                "supported"
            )
        return True

    def _joined_experts(self, stored: Iterable[str]) -> dict[str, list[str]]:
        """By this package's name of all experts' matrices, the stored names of each, in order."""
        found: dict[str, dict[int, str]] = {}
        for name in stored:
            match = _IN_LAYER.fullmatch(name)
            if match is None or (number := _NUMBER.search(match[2])) is None:
                continue
            module = self._layout.experts.get(_NUMBER.sub("*", match[2]))
            if module is not None:
                stacked = f"{match[1]}{module}.{match[3]}"
                found.setdefault(stacked, {})[int(number[0])] = name
        for stacked, names in found.items():
            shapes = {self._stored.shapes[name] for name in names.values()}
            if len(shapes) > 1 or {*names} != {*range(len(names))}:
                raise InputError(
                    f"{self._where}: {stacked!r} is stored expert by expert, and of "
                    f"{max(names) + 1} experts there are {len(names)}, of {len(shapes)} shapes; "
                    f"{GET_AGAIN}"
                )
        return {stacked: [names[i] for i in range(len(names))] for stacked, names in found.items()}

    def _parts_of(self, name: str) -> Iterator[tuple[str, _Part]]:
        """By this package's names, the parts that a stored tensor consists of."""
        rows = next(iter(self._stored.shapes[name]))
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            yield name, _Part(name, 0, rows)
            return
        modules = self._layout.modules.get(match[2], (match[2],))
        if len(modules) == 1:
            kind = _OTHER_KINDS.get(match[3], match[3])
            yield f"{match[1]}{modules[0]}.{kind}", _Part(name, 0, rows)
            return
        counts = [self._rows[module] for module in modules]
        if sum(counts) != rows:
            raise InputError(
                f"{self._where}: tensor {name!r} has {rows} rows, and the configuration says "
                f"{' + '.join(map(str, counts))}; {GET_AGAIN}"
            )
        start = 0
        for module, count in zip(modules, counts, strict=True):
            yield f"{match[1]}{module}.{match[3]}", _Part(name, start, count)
            start += count

    def _read_rows(self, name: str, part: Index) -> np.ndarray:
        stored, (rows, *rest) = self._parts[name], part
        shifted = slice(rows.start + stored.start, rows.stop + stored.start)
        return self._stored.read(stored.name, (shifted, *rest))

    def _read_heads(self, name: str, part: Index) -> np.ndarray:
        """Rows of heads whose rotated dimensions are stored as neighbours."""
        rows, *rest = part
        all_rows, within = self._heads(rows)
        return self._by_halves(self._read_rows(name, (all_rows, *rest)))[within].copy()

    def _read_norms(self, name: str, part: Index) -> np.ndarray:
        """Norms of heads whose rotated dimensions are stored as neighbours, a row a head."""
        rows, dims = part
        heads = self._read_rows(name, (rows, slice(0, len(self._head_order))))
        return heads[:, self._head_order[dims]]

    def _heads(self, rows: slice) -> tuple[slice, slice]:
        """The rows of whole heads that some rows are part of, and where these are among them."""
        size = len(self._head_order)
        first, last = rows.start // size * size, -(-rows.stop // size) * size
        return slice(first, last), slice(rows.start - first, rows.stop - first)

    def _by_halves(self, stored: np.ndarray) -> np.ndarray:
        """Whole heads whose rotated dimensions are stored as neighbours."""
        heads = stored.reshape(-1, len(self._head_order), *stored.shape[1:])
        return heads[:, self._head_order].reshape(stored.shape)


@functools.cache
def _head_order(head_dim: int, rotary_dim: int) -> np.ndarray:
    """The stored dimension of each dimension of a head: the first halves of all pairs, the second
    ones, and those that are not rotated."""
    pairs = np.arange(rotary_dim).reshape(-1, 2).T
    return np.concatenate([pairs.reshape(-1), np.arange(rotary_dim, head_dim)])
