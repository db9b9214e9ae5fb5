"""Which requests may wait for a slot, and when the others should come again."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from ssd_jax.server.errors import ApiError, invalid

_LONGEST_WAIT = 60  # seconds


class Admission:
    """Counts the texts that are decoded or wait.

    Args:
      slots: texts that are decoded at a time.
      queue: texts that may wait beside them.

    Attributes:
      texts: those admitted that have not ended.
    """

    def __init__(self, slots: int, queue: int) -> None:
        self.slots, self.queue = slots, queue
        self.texts = 0
        self._seconds = 1.0  # that a text takes, lately

    @property
    def running(self) -> int:
        """Texts in slots."""
        return min(self.texts, self.slots)

    @property
    def waiting(self) -> int:
        """Texts that wait for a slot."""
        return self.texts - self.running

    @contextlib.contextmanager
    def admit(self, texts: int, param: str = "n") -> Iterator[None]:
        """Admits the texts of a request while the context lasts.

        Args:
          param: the field that says how many they are.

        Raises:
          ApiError: more than may ever wait, or more than may wait now.
        """
        limit = self.slots + self.queue
        if texts > limit:
            raise invalid(
                f"{param} asks for {texts} texts; at most {limit} run or wait at a time, so give "
                "fewer in a request",
                param,
            )
        if self.texts + texts > limit:
            raise ApiError(
                429,
                f"{self.texts} texts run or wait, and with {texts} more there would be more than "
                f"{limit}; try again later",
                code="queue_full",
                retry_after=self._wait(self.texts + texts - limit),
            )
        self.texts += texts
        start = time.monotonic()
        try:
            yield
        finally:
            self.texts -= texts
            self._seconds += 0.1 * (time.monotonic() - start - self._seconds)

    def _wait(self, excess: int) -> int:
        """Seconds until so many texts have ended, from how long requests took lately."""
        rounds = math.ceil(excess / self.slots)
        return min(max(math.ceil(rounds * self._seconds), 1), _LONGEST_WAIT)
