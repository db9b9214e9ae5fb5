"""Which tensors of a model share an array, so that its programs are called with few.

Every array argument of a program costs the host one to three microseconds, several on several
devices, and the parameters of a layer are nine or more.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.models.layers import Axes
from ssd_jax.models.sharding import TENSOR_AXIS, ShardingRules

_LAYERS = "model.layers."
_ALIGNMENT = 64  # bytes
_JOINED = ("q_proj.", "k_proj.", "v_proj.")

Structs = Mapping[str, jax.ShapeDtypeStruct]


class Bundle(NamedTuple):
    """An array that holds several tensors.

    Attributes:
      struct: of the array, without a sharding.
      axes: logical names of its axes, of the last ones if there are fewer.
      devices: that have equal parts of each tensor's rows; where these are several, the array is
        [devices, rows of each, ...].
    """

    struct: jax.ShapeDtypeStruct
    axes: Axes
    devices: int = 1

    def piece(self, whole: jax.Array, at: int, shape: tuple[int, ...]) -> jax.Array:
        """The tensor of a shape whose rows begin at `at`, on each device."""
        rows, axis = shape[0] // self.devices, int(self.devices > 1)
        return jax.lax.slice_in_dim(whole, at, at + rows, axis=axis).reshape(shape)

    def filled(self, whole: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        """The array with a tensor, whose rows begin at `at`; a layer is one row of a stack."""
        axis = int(self.devices > 1)
        rows = values.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice_in_dim(whole, rows, at, axis)


class Bundles(NamedTuple):
    """All of a model.

    Attributes:
      arrays: by name.
      pieces: by tensor, the name of the array that holds it, and its first row there.
    """

    arrays: dict[str, Bundle]
    pieces: dict[str, tuple[str, int]]


def of_bytes(variables: Structs, packed: Container[str]) -> Bundles:
    """The `packed` weights of each layer, and its own norms, as bytes in one array."""
    ends: dict[str, int] = {}
    pieces = {}
    for name, struct in variables.items():
        layer, part = _split(name)
        if layer and (name in packed or part.endswith("layernorm.weight")):
            pieces[name] = layer, ends.get(layer, 0)
            nbytes = math.ceil(struct.size * struct.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
            ends[layer] = pieces[name][1] + nbytes
    structs = {layer: jax.ShapeDtypeStruct((end,), jnp.uint8) for layer, end in ends.items()}
    return Bundles({layer: Bundle(struct, (None,)) for layer, struct in structs.items()}, pieces)


def of_rows(
    variables: Structs, axes: Mapping[str, Axes], rules: ShardingRules, devices: int
) -> Bundles:
    """Those of a layer with rows of the same type and width, which so many devices share alike,
    below each other.

    Queries, keys and values come first and in this order: XLA joins their products, for which it
    would copy weights that lie elsewhere.
    """
    arrays: dict[str, Bundle] = {}
    pieces = {}

    def place(name: str) -> int:
        return next((i for i, part in enumerate(_JOINED) if part in name), len(_JOINED))

    for name in sorted(variables, key=place):
        struct, (layer, _) = variables[name], _split(name)
        if layer:
            cut = rules.spec(axes[name]) if devices > 1 else ()
            parts = devices if cut and cut[0] == TENSOR_AXIS else 1
            rows, width = struct.shape[0] // parts, struct.shape[1:]
            bundle = f"{layer}.{struct.dtype.name}{list(width)}{[*cut]}"
            at = arrays[bundle].struct.shape[parts > 1] if bundle in arrays else 0
            shape, own = (at + rows, *width), axes[name]
            if parts > 1:
                shape, own = (parts, *shape), (own[0], None, *own[1:])
            arrays[bundle] = Bundle(jax.ShapeDtypeStruct(shape, struct.dtype), own, parts)
            pieces[name] = bundle, at
    return Bundles(arrays, pieces)


def of_layers(
    variables: Structs, axes: Mapping[str, Axes], tensors: Mapping[str, Iterable[str]]
) -> Bundles:
    """The same parameter of all layers, which is one variable; `tensors` has its one of each."""
    arrays = {
        name: Bundle(struct, axes[name]) for name, struct in variables.items() if _split(name)[0]
    }
    pieces = {
        tensor: (name, layer) for name in arrays for layer, tensor in enumerate(tensors[name])
    }
    return Bundles(arrays, pieces)


def _split(name: str) -> tuple[str, str]:
    """A layer's name and the rest of a tensor's name; no layer, if it is of none."""
    before, layers, rest = name.partition(_LAYERS)
    if before or not layers:
        return "", name
    index, _, part = rest.partition(".")
    return f"{layers}{index}", part
