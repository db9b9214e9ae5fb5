"""The tensors of a checkpoint with quantised matrices."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.quantized.scheme import Scheme
from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.safetensors import FLOATS, SafetensorsDirectory
from ssd_jax.checkpoints.weights.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.kinds import BFLOAT16
from ssd_jax.system.files import GET_AGAIN

_MISFITS = (ValueError, LookupError, TypeError, ArithmeticError)
_OF_THE_CACHE = re.compile(
    r".*\.self_attn\.(([qkv]|kv)_scale|[kv]_proj\.[kv]_scale|(k|v|q|attn)_proj\.output_scale)"
)


class QuantizedTensors(TensorSource):
    """A checkpoint's matrices as floats, or in blocks for products that read them as they are.

    A tensor is a matrix that the format describes if the arrays are there that it needs, whatever
    the configuration says of exceptions. Scales of activations and of the cache are left out: this
    package computes with neither.

    Raises:
      InputError: no matrix is quantised, or arrays do not fit each other.
    """

    def __init__(self, stored: SafetensorsDirectory, scheme: Scheme, *, where: str) -> None:
        self._stored, self._scheme, self._where = stored, scheme, where
        main = f"{scheme.separator}{scheme.main}"
        modules = [name.removesuffix(main) for name in stored.shapes if name.endswith(main)]
        lacking = {module: list(self._lacking(module)) for module in modules}
        self._modules = {f"{module}.weight": module for module in modules if not lacking[module]}
        if not self._modules:
            raise InputError(
                f"{where}: no tensor is quantised, and config.json says so; {GET_AGAIN}"
            )
        suffixes = scheme.main, *(name for names in scheme.needed for name in names), *scheme.beside
        read = {self._array(module, name) for module in self._modules.values() for name in suffixes}
        plain = {
            name: shape
            for name, shape in stored.shapes.items()
            if name not in read and not _OF_THE_CACHE.fullmatch(name)
        }
        self._shapes = {name: self._shape(module) for name, module in self._modules.items()}
        self._kinds = {name: self._kind(module) for name, module in self._modules.items()}
        self.shapes = plain | self._shapes

    def _lacking(self, module: str) -> Iterator[str]:
        """Names of arrays that the module would need to be quantised.

        Raises:
          InputError: it has integers, and arrays are missing without which these say nothing.
        """
        for names in self._scheme.needed:
            arrays = [self._array(module, name) for name in names]
            if not any(array in self._stored.shapes for array in arrays):
                main = self._array(module, self._scheme.main)
                if self._stored.kind(main) not in FLOATS:
                    raise InputError(
                        f"{self._where}: {main!r} is quantised, and {arrays[0]!r} is missing; "
                        f"{GET_AGAIN}"
                    )
                yield arrays[0]

    def _array(self, module: str, suffix: str) -> str:
        return f"{module}{self._scheme.separator}{suffix}"

    def _shape(self, module: str) -> tuple[int, ...]:
        try:
            return self._scheme.shape(self._stored, module)
        except _MISFITS as error:
            raise self._misfit(module, error) from None

    def _kind(self, module: str) -> str | None:
        try:
            return self._scheme.kind(self._stored, module)
        except _MISFITS as error:
            raise self._misfit(module, error) from None

    def _misfit(self, module: str, error: Exception) -> InputError:
        return InputError(
            f"{self._where}: the quantised matrix {module!r} cannot be read: {error}; {GET_AGAIN}"
        )

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self._stored.shape(name)

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        module = self._modules.get(name)
        if module is None:
            return self._stored.read_part(name, part)
        try:
            values = self._scheme.read_part(self._stored, module, part)
        except _MISFITS as error:
            raise self._misfit(module, error) from None
        return np.ascontiguousarray(values)

    @override
    def stored_type(self, name: str) -> str | None:
        """The kind of a quantised matrix, its format's name if it has no kind; bfloat16 for what is
        beside them."""
        return self._kinds.get(name, BFLOAT16.name) or self._scheme.name

    @override
    def group_form(self, name: str) -> GroupForm | None:
        module = self._modules.get(name)
        return None if module is None else self._scheme.group_form(self._stored, module)

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        module = self._modules[name]
        try:
            return self._scheme.read_stored_groups(self._stored, module, rows)
        except _MISFITS as error:
            raise self._misfit(module, error) from None

    @override
    def read_expert_groups(self, name: str, expert: int, rows: slice) -> StoredGroups:
        module = self._modules[name]
        try:
            return self._scheme.read_expert_groups(self._stored, module, expert, rows)
        except _MISFITS as error:
            raise self._misfit(module, error) from None

    @override
    def read_expert_blocks(
        self, name: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        module = self._modules[name]
        try:
            return self._scheme.read_expert_blocks(self._stored, module, expert, rows)
        except _MISFITS as error:
            raise self._misfit(module, error) from None

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        module = self._modules[name]
        try:
            return self._scheme.read_blocks(self._stored, module)
        except _MISFITS as error:
            raise self._misfit(module, error) from None
