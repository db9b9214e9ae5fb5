"""A stream between an engine and its worker, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ssd_jax.placement.process.messages import Hello

_OTHERS = 2**16  # bytes of whatever is no array: an opening with its stop strings


class StreamError(Exception):
    """A stream has ended, by no word of the worker's.

    Args:
      why: it has.
      refused: the worker does not let this engine in.
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Stream(Protocol):
    """An engine's end.

    Attributes:
      heard: the worker has let it in.
    """

    heard: bool

    def send(self, data: bytes) -> None:
        """Sends a message; nothing is raised, since `answers` says why nothing arrives."""
        ...

    def flush(self, timeout: float) -> bool:
        """Waits so many seconds until all that was sent has left; returns whether it has."""
        ...

    def answers(self) -> Iterator[bytes]:
        """Messages of the worker, until it ends the stream.

        Raises:
          StreamError: the stream broke.
        """
        ...

    def close(self) -> None:
        """Ends the stream."""
        ...


OpenStream = Callable[[str, str, int], Stream]
"""Opens a stream to an address, with a token and the most bytes of a message."""


Answers = Callable[[Iterator[bytes]], Iterator[bytes]]
"""A stream at a worker: answers, from what an engine says."""


def message_size(about: Hello) -> int:
    """Bytes that no message with a use has more of."""
    rows = about.slots * (about.context + 4 * (about.k + 4))
    branches = about.slots * about.branches * (2 * about.k + 2)
    q = 2 * about.slots * about.k * (about.support + 1)
    return min(2 * (_OTHERS + 4 * (rows + branches + q)), 2**31 - 1)
