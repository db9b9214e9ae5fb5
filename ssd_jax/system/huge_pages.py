"""Memory in huge pages, for weights, which are read in full at every step.

With pages of 4 KiB a core that streams through memory spends much of its time finding them: two
thirds of the read bandwidth were measured. The system is asked, and where it does not know huge
pages, or has none, the memory is as ever.
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
"""Bytes; what JAX takes without a copy."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Shared memory, which is the default, has no huge pages."""


class HugePages:
    """Gives out arrays that lie side by side; a chunk is freed with the last array in it."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)
        self._changed = threading.Lock()

    def room(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8 that begin at a multiple of 64 bytes. Threads may call it at once."""
        size = math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT
        with self._changed:
            if size > self._free.size:
                self._free = _chunk(max(size, _CHUNK))
            room, self._free = self._free[:nbytes], self._free[size:]
        return room

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy of an array in `room` of its size."""
        placed = self.room(array.nbytes).view(array.dtype).reshape(array.shape)
        placed[...] = array
        return placed


def _chunk(size: int) -> np.ndarray:
    size = math.ceil(size / _PAGE) * _PAGE
    memory = mmap.mmap(-1, size + _PAGE, flags=_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % _PAGE
    return whole[first : first + size]
