"""Weights in the quantised types that a GGUF file stores them in, for `dtype = native`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from ssd_jax.checkpoints.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.kinds import KINDS, LANES, STORED_KINDS
from ssd_jax.kernels.linear.packing import pack_blocks

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OTHERWISE = "give --dtype=bfloat16 or --dtype=int8 (--draft_dtype of a draft)"


def native_kinds(tensors: TensorSource, names: Iterable[str], *, where: str) -> dict[str, str]:
    """The kind (`kernels.linear.kinds`) of each of these matrices, as it is stored; reads none.

    Args:
      where: names the checkpoint in errors.

    Raises:
      InputError: no GGUF file, or a type that no kernel takes.
    """
    kinds = {name: tensors.stored_type(name) for name in names}
    if None in kinds.values():
        raise InputError(
            f"{where} is no GGUF file, and dtype = 'native' takes the weights of one as they are "
            f"quantised in it; {_OTHERWISE}"
        )
    lacking = [name for name, kind in kinds.items() if kind not in STORED_KINDS]
    if lacking:
        found = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds.values()).items())
        raise InputError(
            f"{where}: dtype = 'native' has no products with {kinds[lacking[0]]}, the type of "
            f"tensor {lacking[0]!r}; the file's matrices are {found}, and the types with products "
            f"are {', '.join(STORED_KINDS)}; {_OTHERWISE}"
        )
    return {name: str(kind) for name, kind in kinds.items()}


def has_native(tensors: TensorSource) -> bool:
    """Whether `native_kinds` knows every matrix that takes part in a product."""
    names = [name for name, shape in tensors.shapes.items() if len(shape) == 2]
    looked_up = _EMBEDDING if _HEAD in names else None
    return all(tensors.stored_type(name) in STORED_KINDS for name in names if name != looked_up)


class PackedTensors(TensorSource):
    """A GGUF file with some matrices as panels, uint8 [panels, panel_bytes]; the others as ever.

    Args:
      tensors: the file.
      kinds: of the matrices to pack, from `native_kinds`.
    """

    def __init__(self, tensors: TensorSource, kinds: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._kinds = {name: KINDS[kind] for name, kind in kinds.items()}
        self.shapes = dict(tensors.shapes) | {
            name: kind.packed_shape(*tensors.shape(name)) for name, kind in self._kinds.items()
        }

    def read_part(self, name: str, part: Index) -> np.ndarray:
        """See `TensorSource.read`; only the panels that the part touches are packed."""
        kind = self._kinds.get(name)
        if kind is None:
            return self._tensors.read(name, part)
        panels, columns = part
        rows = self._tensors.read_blocks(name)[panels.start * LANES : panels.stop * LANES]
        return pack_blocks(kind, rows)[:, columns]
