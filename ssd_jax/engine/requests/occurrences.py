"""Gives requests of one seed and index different noise, where sharing it would bias them.

Two requests with the same seed and index would share all random numbers. Under a timed rule
(`sampling/rules.py`) a text also depends on the lengths of its proposals. If these depend on time,
they depend on other requests' random numbers, and the text is biased where those are its own. So a
repeated pair gets a hashed seed.

Pure host code.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

_CAPACITY = 65_536


class Occurrences:
    """Counts the requests of each seed and index, and gives each occurrence a seed.

    Engines share one if the time of one's rounds may show on another's clock. Any thread may ask.

    Args:
      capacity: pairs that are remembered. When there are more, all are forgotten and a new
        generation begins, whose number is hashed too: no seed is repeated, and memory is bounded.
      first: called before the first request is counted.
    """

    def __init__(
        self, *, capacity: int = _CAPACITY, first: Callable[[], None] = lambda: None
    ) -> None:
        self._capacity, self._first = capacity, first
        self._counts: dict[tuple[int, int], int] = {}
        self._generation = 0
        self._lock = threading.Lock()

    def seed(self, seed: int, index: int) -> int:
        """The 64-bit seed of a request that begins.

        It is the user's if the request is the first of its pair and none was forgotten.
        """
        with self._lock:
            if not self._counts and not self._generation:
                self._first()
            pair = seed, index
            if pair not in self._counts and len(self._counts) == self._capacity:
                self._counts.clear()
                self._generation += 1
            occurrence = self._counts.get(pair, 0)
            self._counts[pair] = occurrence + 1
            generation = self._generation
        if not occurrence and not generation:
            return seed
        return derived(seed, index, generation, occurrence)


def derived(seed: int, index: int, generation: int, occurrence: int) -> int:
    """A 64-bit seed: BLAKE2b of the four numbers, little-endian words of 64 bits."""
    words = b"".join(int(n).to_bytes(8, "little") for n in (seed, index, generation, occurrence))
    digest = hashlib.blake2b(words, digest_size=8, person=b"ssd_jax seed").digest()
    return int.from_bytes(digest, "little")
