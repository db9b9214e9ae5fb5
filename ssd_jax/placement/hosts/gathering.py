"""How followers come to the leader."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ssd_jax.placement.hosts.start import listen
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.host_messages import Greeting, decode
from ssd_jax.wire.listener import Limits, Listener
from ssd_jax.wire.refusals import Refusals

_GREETING_SECONDS, _MAX_GREETING = 5.0, 2**12  # seconds and most bytes of a follower's greeting
_LIMITS = Limits(seconds=5.0)


class Host(NamedTuple):
    """A follower, as the leader knows it."""

    name: str
    link: Frames


class Gathering:
    """Followers that have come.

    Args:
      count: number of processes, the leader included.
      silence: seconds for which a follower may be silent.
      on_host: is called with the index of each follower that has come, and its connection.

    Attributes:
      hosts: by index.
    """

    def __init__(self, count: int, silence: float, on_host: Callable[[int, Frames], None]) -> None:
        self.hosts: dict[int, Host] = {}
        self._count, self._silence, self._on_host = count, silence, on_host
        self._changed, self._ended = threading.Condition(), False
        self._refusals = Refusals("hosts: a connection")

    @contextlib.contextmanager
    def listen(self, host: str, port: int) -> Iterator[tuple[int, str]]:
        """Admits followers at a port; gives the port, and the secret that they must know.

        Raises:
          InputError: the port cannot be had.
        """
        endpoint = listen(host, port, "give the leader another by stream=")
        secret = secrets.token_hex(32)
        listener = Listener(
            endpoint, secret, self._greet, self._refusals, silence=self._silence, limits=_LIMITS
        )
        try:
            yield endpoint.socket.getsockname()[1], secret
        finally:
            listener.stop()

    def wait(self, seconds: float) -> list[int]:
        """Waits until all have come, or `end` is called; returns the indices of those missing."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._missing(), seconds)
            return self._missing()

    def end(self) -> None:
        """Ends the wait; nobody is waited for any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _missing(self) -> list[int]:
        return sorted({*range(1, self._count)} - {*self.hosts})

    def _greet(self, link: Frames) -> None:
        """Admits a follower; then the leader receives from it, and sends it beats."""
        try:
            greeting = decode(link.receive_first(_GREETING_SECONDS, max_bytes=_MAX_GREETING))
            if not isinstance(greeting, Greeting):
                raise OSError(f"its {type(greeting).__name__} is not waited for")
            self._admit(greeting, link)
        except OSError as error:
            self._refusals.log("follower", link.end_reason(error))
            link.close()
        else:
            self._on_host(greeting.index, link)

    def _admit(self, greeting: Greeting, link: Frames) -> None:
        with self._changed:
            if self._ended or greeting.index not in self._missing():
                raise OSError(f"process {greeting.index} is not waited for")
            self.hosts[greeting.index] = Host(greeting.name, link)
            self._changed.notify_all()
