"""Loads tensors directly into the arrays that hold several of them."""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np
from jaxtyping import UInt8

from ssd_jax.models.bundles import Bundle
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.tensor_loading import Loaded
from ssd_jax.system.huge_pages import HugePages
from ssd_jax.system.new_arrays import zeros
from ssd_jax.system.stored_jit import StoredJit


class Stacks:
    """A model's bundles, filled tensor by tensor, in the order of loading.

    A bundle is allocated on its devices when its first tensor arrives, and updated in place: they
    hold at most the weights and one more tensor, where joining lists would hold the weights twice.
    Packed weights are filled in host memory, those that stay as they are stored in their place.

    Args:
      pages: memory that packed weights are allocated in.
    """

    def __init__(self, model: FunctionalModel, pages: HugePages) -> None:
        self._arrays: dict[str, jax.Array] = {}
        self._model = model
        self._structs = model.bundle_structs()
        packed = self._structs if model.has_panels else {}
        self._pages = pages
        self._buffers = {name: pages.allocate(struct.size) for name, struct in packed.items()}
        self._lock = threading.Lock()

    def memory(self, name: str, nbytes: int) -> UInt8[np.ndarray, "bytes"]:
        """Zeros for a packed tensor of so many bytes, in its bundle if it has one."""
        bundle, offset = self._model.bundles.locations.get(name, (None, 0))
        if bundle is None:
            return self._pages.allocate(nbytes)
        return self._buffers[bundle][offset : offset + nbytes]

    def prepare(self, name: str, array: Loaded) -> dict[str, jax.Array]:
        """As `FunctionalModel.prepare`, but puts tensors of bundles there and returns the rest."""
        unbundled = {}
        for tensor, values in self._model.prepare(name, array).items():
            bundle, offset = self._model.bundles.locations.get(tensor, (None, 0))
            if bundle is None:
                unbundled[tensor] = values
            elif bundle in self._buffers:
                stored = np.asarray(values).reshape(-1).view(np.uint8)
                place = self._buffers[bundle][offset : offset + values.nbytes]
                if stored.ctypes.data != place.ctypes.data:
                    place[:] = stored
            else:
                self._put(bundle, values, offset)
        return unbundled

    def arrays(self) -> dict[str, jax.Array]:
        """All bundles, by name, for `FunctionalModel.assemble`."""
        packed = {
            name: jax.device_put(buffer, self._structs[name].sharding)
            for name, buffer in self._buffers.items()
        }
        return self._arrays | packed

    def _put(self, bundle: str, values: jax.Array, offset: int) -> None:
        struct = self._structs[bundle]
        with self._lock:
            if bundle not in self._arrays:
                self._arrays[bundle] = zeros(struct)
            write = _writer(self._model.bundles.arrays[bundle], struct.sharding)
            self._arrays[bundle] = jax.block_until_ready(
                write(self._arrays.pop(bundle), values, offset)
            )


@functools.cache
def _writer(bundle: Bundle, sharding: jax.sharding.Sharding | None):
    return StoredJit(bundle.with_tensor, donate=(0,), out_shardings=sharding)
