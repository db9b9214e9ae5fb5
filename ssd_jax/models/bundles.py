"""Which tensors of a model share an array, so that its programs are called with few.

Every array argument of a program costs the host one to three microseconds, and the parameters of a
layer are nine or more.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

_LAYERS = "model.layers."
_ALIGNMENT = 64  # bytes
_JOINED = ("q_proj.", "k_proj.", "v_proj.")

Structs = Mapping[str, jax.ShapeDtypeStruct]


class Bundles(NamedTuple):
    """Arrays that hold several tensors.

    Attributes:
      structs: of these arrays, by name.
      pieces: by tensor, the name of the array that holds it, and its first row there.
    """

    structs: dict[str, jax.ShapeDtypeStruct]
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
    return Bundles(structs, pieces)


def of_rows(variables: Structs) -> Bundles:
    """Those of a layer with rows of the same type and width, below each other.

    Queries, keys and values come first and in this order: XLA joins their products, for which it
    would copy weights that lie elsewhere.
    """
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    pieces = {}

    def place(name: str) -> int:
        return next((i for i, part in enumerate(_JOINED) if part in name), len(_JOINED))

    for name in sorted(variables, key=place):
        struct, layer = variables[name], _split(name)[0]
        if layer:
            width = struct.shape[1:]
            bundle = f"{layer}.{struct.dtype.name}{list(width)}"
            at = structs[bundle].shape[0] if bundle in structs else 0
            structs[bundle] = jax.ShapeDtypeStruct((at + struct.shape[0], *width), struct.dtype)
            pieces[name] = bundle, at
    return Bundles(structs, pieces)


def of_layers(variables: Structs, tensors: Mapping[str, Iterable[str]]) -> Bundles:
    """The same parameter of all layers, which is one variable; `tensors` has its one of each."""
    structs = {name: struct for name, struct in variables.items() if _split(name)[0]}
    pieces = {
        tensor: (name, layer) for name in structs for layer, tensor in enumerate(tensors[name])
    }
    return Bundles(structs, pieces)


def _split(name: str) -> tuple[str, str]:
    """A layer's name and the rest of a tensor's name; no layer, if it is of none."""
    before, layers, rest = name.partition(_LAYERS)
    if before or not layers:
        return "", name
    index, _, part = rest.partition(".")
    return f"{layers}{index}", part
