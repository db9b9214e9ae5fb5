"""A stream between an engine and its worker, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ssd_jax.wire.messages import Hello

_OTHERS = 2**16  # bytes of everything except arrays: an opening with its stop strings


class StreamError(Exception):
    """A stream has ended without a message from the worker.

    Args:
      why: why it has ended.
      refused: whether the worker refuses this engine.
    """

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class Stream(Protocol):
    """An engine's end of a stream.

    Attributes:
      heard: whether the worker has let it in.
    """

    heard: bool

    def send(self, data: bytes) -> None:
        """Sends a message; raises nothing, since `answers` reports why nothing arrives."""
        ...

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until all messages have left; returns whether they have."""
        ...

    def answers(self) -> Iterator[bytes]:
        """Messages from the worker, until it ends the stream.

        Raises:
          StreamError: the stream broke.
        """
        ...

    def close(self) -> None:
        """Ends the stream."""
        ...


OpenStream = Callable[[str, str, int], Stream]
"""Opens a stream to an address, with a token and the most bytes of a message."""


Gone = Callable[[], bool]
"""Whether the engine of a stream has left, as far as is known."""
Answers = Callable[[Iterator[bytes], Gone], Iterator[bytes]]
"""Serves a stream at a worker: answers, given the messages of an engine."""


def message_size(about: Hello) -> int:
    """Most bytes of any useful message."""
    rows = about.slots * (about.context + 4 * (about.k + 4))
    branches = about.slots * about.branches * (2 * about.k + 2)
    q = 2 * about.slots * about.k * (about.support + 1)
    return min(2 * (_OTHERS + 4 * (rows + branches + q)), 2**31 - 1)
