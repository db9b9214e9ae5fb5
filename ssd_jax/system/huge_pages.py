"""Memory in huge pages, for weights, which are read in full at every step.

With pages of 4 KiB, a core that streams through memory spends much of its time on address
translation: two thirds of the read bandwidth were measured. Huge pages are requested; if the system
does not know them, or has none, memory is ordinary.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import numpy as np

_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 64
"""Bytes; alignment that JAX takes without a copy."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Shared memory, the default of `mmap`, has no huge pages."""


class HugePages:
    """Allocates arrays side by side in chunks; a chunk is freed with the last array in it."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)
        self._changed = threading.Lock()

    def allocate(self, nbytes: int) -> np.ndarray:
        """An array [nbytes] uint8, aligned to 64 bytes. Several threads may call it at once."""
        size = math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        with self._changed:
            if size > self._free.size:
                self._free = _chunk(max(size, _CHUNK))
            array, self._free = self._free[:nbytes], self._free[size:]
        return array

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy of an array, in memory from `allocate`."""
        copied = self.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        copied[...] = array
        return copied


def _chunk(size: int) -> np.ndarray:
    size = math.ceil(size / _PAGE) * _PAGE
    memory = mmap.mmap(-1, size + _PAGE, flags=_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    offset = -buffer.ctypes.data % _PAGE
    return buffer[offset : offset + size]
