"""The packed weights of a layer in one array of bytes.

Every array that a program is called with costs the host about a microsecond, and a layer has nine
for products. A bundle holds its matrices and the norms before them; the layer has `Piece`s of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container

from flax import nnx

from ssd_jax.models.decoder import CausalLM, DecoderLayer
from ssd_jax.models.layers import Matrix, RMSNorm

_ALIGNMENT = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One array of bytes.

    Attributes:
      at: of each tensor, by name: its first byte.
      nbytes: of all.
    """

    at: dict[str, int]
    nbytes: int


def bundles(module: CausalLM, packed: Container[str]) -> dict[str, Bundle]:
    """A bundle for each layer, by the layer's name: of its `packed` weights and its own norms."""
    layers = {
        ".".join(map(str, path)): layer
        for path, layer in nnx.iter_modules(module)
        if isinstance(layer, DecoderLayer)
    }
    return {name: _bundle(name, layer, packed) for name, layer in layers.items()}


def _bundle(layer_name: str, layer: DecoderLayer, packed: Container[str]) -> Bundle:
    at, end = {}, 0
    for path, each in nnx.iter_modules(layer):
        name = ".".join(map(str, (layer_name, *path, "weight")))
        if not isinstance(each, Matrix | RMSNorm):
            continue
        if name in packed or (isinstance(each, RMSNorm) and len(path) == 1):
            at[name] = end
            value = each.weight.get_value()
            end += math.ceil(value.size * value.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
    return Bundle(at, end)
