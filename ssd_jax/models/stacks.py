"""Loads tensors directly into the arrays that hold several of them."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.models.functional import FunctionalModel
from ssd_jax.system.huge_pages import HugePages


class Stacks:
    """Parameters that are filled tensor by tensor, in the order of loading.

    The stack of a scanned parameter is allocated on its devices when its first layer arrives, and
    updated in place: devices hold at most the weights and one more tensor, where stacking lists
    would hold the weights twice. A bundle (see `FunctionalModel`) is filled in host memory.

    Args:
      pages: memory that bundles are allocated in.
    """

    def __init__(self, model: FunctionalModel, pages: HugePages) -> None:
        self._arrays: dict[str, jax.Array] = {}
        self._model = model
        self._places = {
            name: (stack, layer, struct)
            for stack, struct, names in model.stacked()
            for layer, name in enumerate(names)
        }
        self._bundles = {name: pages.room(nbytes) for name, nbytes in model.bundles.items()}
        self._lock = threading.Lock()

    def prepare(self, name: str, array: jax.Array) -> dict[str, jax.Array]:
        """As `FunctionalModel.prepare`, but keeps arrays that belong here and returns the rest."""
        kept = {}
        for part, values in self._model.prepare(name, array).items():
            if part in self._places:
                self._put(part, values)
            elif part in self._model.pieces:
                bundle, at = self._model.pieces[part]
                stored = np.asarray(values).reshape(-1).view(np.uint8)
                self._bundles[bundle][at : at + values.nbytes] = stored
            else:
                kept[part] = values
        return kept

    def arrays(self) -> dict[str, jax.Array]:
        """All stacks and bundles, by name, for `FunctionalModel.assemble`."""
        structs = self._model.bundle_structs()
        made = {
            name: jax.device_put(self._bundles[name], s.sharding) for name, s in structs.items()
        }
        return self._arrays | made

    def _put(self, name: str, values: jax.Array) -> None:
        stack, layer, struct = self._places[name]
        with self._lock:
            if stack not in self._arrays:
                self._arrays[stack] = jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
            written = _writer(struct.sharding)(self._arrays.pop(stack), values, layer)
            self._arrays[stack] = jax.block_until_ready(written)


@functools.cache
def _writer(sharding: jax.sharding.Sharding | None):
    return jax.jit(
        lambda stack, values, layer: stack.at[layer].set(values),
        donate_argnums=0,
        out_shardings=sharding,
    )
