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
_FUSED = ("q_proj.", "k_proj.", "v_proj.")
_NORMED = {
    "input_layernorm.weight": "self_attn.q_proj.weight",
    "post_attention_layernorm.weight": "mlp.up_proj.weight",
}
"""Norms, and a weight of the products that they are parts of."""

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

    def tensor(self, array: jax.Array, first_row: int, shape: tuple[int, ...]) -> jax.Array:
        """The tensor of a shape whose rows begin at `first_row`, on each device."""
        rows, axis = shape[0] // self.devices, int(self.devices > 1)
        return jax.lax.slice_in_dim(array, first_row, first_row + rows, axis=axis).reshape(shape)

    def with_tensor(self, array: jax.Array, values: jax.Array, first_row: jax.Array) -> jax.Array:
        """The array with a tensor written to rows from `first_row` on; a layer is a stack's row."""
        axis = int(self.devices > 1)
        rows = values.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])
        return jax.lax.dynamic_update_slice_in_dim(array, rows, first_row, axis)


class Bundles(NamedTuple):
    """All bundles of a model.

    Attributes:
      arrays: by name.
      locations: by tensor, the name of the array that holds it, and its first row there.
    """

    arrays: dict[str, Bundle]
    locations: dict[str, tuple[str, int]]


def bundle_bytes(variables: Structs, packed: Container[str], *, norms: bool) -> Bundles:
    """One array of bytes for each layer: its `packed` weights and, if there are any, the norms that
    are parts of their products."""
    ends: dict[str, int] = {}
    locations = {}
    for name, struct in variables.items():
        layer, part = _split_layer(name)
        in_product = norms and f"{layer}.{_NORMED.get(part)}" in packed
        if layer and (name in packed or in_product):
            locations[name] = layer, ends.get(layer, 0)
            nbytes = math.ceil(struct.size * struct.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT
            ends[layer] = locations[name][1] + nbytes
    structs = {layer: jax.ShapeDtypeStruct((end,), jnp.uint8) for layer, end in ends.items()}
    return Bundles({layer: Bundle(struct, (None,)) for layer, struct in structs.items()}, locations)


def bundle_rows(
    variables: Structs, axes: Mapping[str, Axes], rules: ShardingRules, devices: int
) -> Bundles:
    """One array for all tensors of a layer with rows of one type and width that `devices` devices
    share alike.

    Queries, keys and values come first and in this order: XLA joins their products, for which it
    would copy weights that lie elsewhere. Weights in groups have arrays of their own: of slices of
    an array XLA would make values.
    """
    arrays: dict[str, Bundle] = {}
    locations = {}

    def order(name: str) -> int:
        return next((i for i, part in enumerate(_FUSED) if part in name), len(_FUSED))

    for name in sorted(variables, key=order):
        struct, (layer, _) = variables[name], _split_layer(name)
        # Experts are indexed by loops, for which slices would be copies.
        if layer and "experts" not in axes[name] and struct.ndim < 3:
            partition = rules.spec(axes[name]) if devices > 1 else ()
            shards = devices if partition and partition[0] == TENSOR_AXIS else 1
            rows, width = struct.shape[0] // shards, struct.shape[1:]
            bundle = f"{layer}.{struct.dtype.name}{list(width)}{[*partition]}"
            first_row = arrays[bundle].struct.shape[shards > 1] if bundle in arrays else 0
            shape, array_axes = (first_row + rows, *width), axes[name]
            if shards > 1:
                shape, array_axes = (shards, *shape), (array_axes[0], None, *array_axes[1:])
            arrays[bundle] = Bundle(jax.ShapeDtypeStruct(shape, struct.dtype), array_axes, shards)
            locations[name] = bundle, first_row
    return Bundles(arrays, locations)


def bundle_layers(
    variables: Structs, axes: Mapping[str, Axes], tensors: Mapping[str, Iterable[str]]
) -> Bundles:
    """One array for each parameter, of all layers; `tensors` has its tensor of every layer."""
    arrays = {
        name: Bundle(struct, axes[name])
        for name, struct in variables.items()
        if [*tensors[name]] != [name]
    }
    locations = {
        tensor: (name, layer) for name in arrays for layer, tensor in enumerate(tensors[name])
    }
    return Bundles(arrays, locations)


def _split_layer(name: str) -> tuple[str, str]:
    """A layer's name, or "" for a tensor outside layers, and the rest of the tensor's name."""
    prefix, layers, rest = name.partition(_LAYERS)
    if prefix or not layers:
        return "", name
    index, _, part = rest.partition(".")
    return f"{layers}{index}", part
