"""Files that hold a matrix of all experts in one array, perhaps joined with another, or turned."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.families.family import ExpertArrays
from ssd_jax.system.files import GET_AGAIN

_IN_LAYER = re.compile(r"(model\.layers\.\d+\.)(.+?)(\.weight|\.bias|_bias|)")


class _Part(NamedTuple):
    """Rows of the matrices of an array: from `start` on every `step`-th, `rows` of them."""

    name: str
    start: int
    step: int
    rows: int
    is_turned: bool  # rows are on the last axis


class JoinedExperts(TensorSource):
    """The tensors with this package's names and rows of experts' matrices [experts, out, in].

    Args:
      arrays: how the file has them.
      where: names the checkpoint in errors.

    Raises:
      InputError: the rows of an array do not divide into those of its modules.
    """

    def __init__(self, stored: TensorSource, arrays: ExpertArrays, *, where: str) -> None:
        self._stored, self._arrays, self._where = stored, arrays, where
        self._parts: dict[str, _Part] = {}
        self.shapes = {}
        for name, shape in stored.shapes.items():
            parts = dict(self._parts_of(name, shape))
            self._parts |= parts
            self.shapes |= {name: self._shape(part, shape) for name, part in parts.items()}
            if not parts:
                self.shapes[name] = shape

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        if part is None:
            return self._stored.shape(name)
        return self._shape(part, self._stored.shape(part.name))

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        stored = self._parts.get(name)
        if stored is None:
            return self._stored.read_part(name, part)
        experts, rows, *inputs = part
        start, step = stored.start, stored.step
        within = slice(rows.start * step + start, max(rows.stop - 1, 0) * step + start + 1)
        axes = (experts, *inputs, within) if stored.is_turned else (experts, within, *inputs)
        values = self._stored.read(stored.name, axes)
        if stored.is_turned:
            values = values.swapaxes(1, 2)
        return np.ascontiguousarray(values[:, ::step][:, : rows.stop - rows.start])

    @override
    def stored_type(self, name: str) -> str | None:
        part = self._parts.get(name)
        return self._stored.stored_type(name if part is None else part.name)

    @override
    def group_form(self, name: str) -> GroupForm | None:
        part = self._parts.get(name)
        if part is None:
            return self._stored.group_form(name)
        return None if part.is_turned else self._stored.group_form(part.name)

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        return self._stored.read_groups(name, rows)

    @override
    def read_expert_groups(self, name: str, expert: int, rows: slice) -> StoredGroups:
        part = self._parts[name]
        return self._stored.read_expert_groups(part.name, expert, _within(part, rows))

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        part = self._parts.get(name)
        if part is None:
            return self._stored.read_blocks(name)
        rows = slice(part.start, part.start + part.step * part.rows, part.step)
        return self._stored.read_blocks(part.name)[:, rows]

    @override
    def read_expert_blocks(
        self, name: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        part = self._parts.get(name)
        if part is None:
            return self._stored.read_expert_blocks(name, expert, rows)
        return self._stored.read_expert_blocks(part.name, expert, _within(part, rows))

    def _parts_of(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, _Part]]:
        """By this package's names, the parts of an array; none if it is not one of experts."""
        match = _IN_LAYER.fullmatch(name)
        modules = () if match is None else self._arrays.modules.get(match[2], ())
        if match is None or not modules:
            return
        kind = "bias" if match[3].endswith("bias") else "weight"
        is_turned = match[3] == ""
        total = shape[-1] if is_turned else shape[1]
        if total % len(modules):
            raise InputError(
                f"{self._where}: tensor {name!r} has {total} rows, which are no "
                f"{len(modules)} matrices; {GET_AGAIN}"
            )
        rows, step = total // len(modules), len(modules) if self._arrays.interleaved else 1
        for number, module in enumerate(modules):
            start = number if self._arrays.interleaved else number * rows
            yield f"{match[1]}{module}.{kind}", _Part(name, start, step, rows, is_turned)

    @staticmethod
    def _shape(part: _Part, stored: tuple[int, ...]) -> tuple[int, ...]:
        if part.is_turned:
            return stored[0], part.rows, stored[1]
        return stored[0], part.rows, *stored[2:]


def _within(part: _Part, rows: slice) -> slice:
    """The rows of an array that some rows of a part are."""
    start = part.start + rows.start * part.step
    return slice(start, start + (rows.stop - rows.start - 1) * part.step + 1, part.step)
