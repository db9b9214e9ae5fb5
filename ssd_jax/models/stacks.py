"""Tensors of layers that are scanned, straight into the arrays that hold all layers."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp

from ssd_jax.models.functional import FunctionalModel


class Stacks:
    """Stacked parameters that are filled layer by layer, as a loader brings their tensors.

    A stack is made where it belongs, when its first layer comes, and changed in place: the devices
    hold the weights and one tensor more at most, where stacking whole lists would hold them twice.

    Attributes:
      arrays: the stacks by name, for `FunctionalModel.assemble`.
    """

    def __init__(self, model: FunctionalModel) -> None:
        self.arrays: dict[str, jax.Array] = {}
        self._model = model
        self._places = {
            name: (stack, layer, struct)
            for stack, struct, names in model.stacked()
            for layer, name in enumerate(names)
        }
        self._lock = threading.Lock()

    def prepare(self, name: str, array: jax.Array) -> dict[str, jax.Array]:
        """As `FunctionalModel.prepare`; what has gone into a stack is not among the results."""
        kept = {}
        for part, values in self._model.prepare(name, array).items():
            if part in self._places:
                self._put(part, values)
            else:
                kept[part] = values
        return kept

    def _put(self, name: str, values: jax.Array) -> None:
        stack, layer, struct = self._places[name]
        with self._lock:
            if stack not in self.arrays:
                self.arrays[stack] = jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
            written = _writer(struct.sharding)(self.arrays.pop(stack), values, layer)
            self.arrays[stack] = jax.block_until_ready(written)


@functools.cache
def _writer(sharding: jax.sharding.Sharding | None):
    return jax.jit(
        lambda stack, values, layer: stack.at[layer].set(values),
        donate_argnums=0,
        out_shardings=sharding,
    )
