"""The engine's end of a worker on another host, started by someone else."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import Counter

from ssd_jax.errors import InputError
from ssd_jax.placement.process.connection import Connection, Link
from ssd_jax.placement.process.supervisor import STARTUP, WorkerSettings
from ssd_jax.system.forks import only_in_owner
from ssd_jax.wire.address import Address
from ssd_jax.wire.security import Files
from ssd_jax.wire.stream import Stream

ANSWER_SECONDS = 10.0
"""Seconds within which a worker must give a sign of life."""
_REMINDER_SECONDS = 60.0  # seconds between log lines while it loads
_NO_TLS = "; a worker that says (TLS) when it starts needs draft_tls_ca and draft_token_file here"
_LOG = logging.getLogger(__name__)


class FarWorker:
    """A `process.placement.Worker` on another host, which loads while the target compiles.

    Args:
      settings: settings of the wanted draft, with the token.
      address: where the worker listens.
      files: secrets and certificates.

    Raises:
      InputError: the files cannot be used.
    """

    end = None
    """This process may not end the worker; it opens new streams instead."""

    def __init__(self, settings: WorkerSettings, address: Address, files: Files) -> None:
        self.address = str(address)
        self.starts = 1
        self._settings, self._address, self._files = settings, address, files
        self.link = Link(
            open=functools.partial(Stream, tls=files.engine_context()),
            shares_clock=address.loopback,
        )
        self._connection: Connection | None = None
        self._end = weakref.finalize(self, lambda: None)

    def start(self) -> None:
        """Asks the worker to load; returns at once."""
        self._connection = self._connect()

    hold = start
    """Asks again; a worker without a stream may drop the draft."""

    def wait_ready(self) -> None:
        """Waits until the worker has loaded.

        Raises:
          InputError: no worker answers at the address, or it refuses.
        """
        began = last_reminder = time.monotonic()
        while self._connection is not None and not self._connection.wait_ready(1.0):
            now = time.monotonic()
            if not self._connection.alive:
                if self._connection.refused or now > began + ANSWER_SECONDS:
                    raise InputError(self._trouble(self._connection))
                time.sleep(0.2)
                self._connection.close()
                self._connection = self._connect()
            elif not self._connection.stream.admitted and now > began + ANSWER_SECONDS:
                raise InputError(self._trouble(self._connection))
            elif now > last_reminder + _REMINDER_SECONDS:
                last_reminder = now
                _LOG.warning("the draft worker at %s still loads after %.0f s", self.address,
                             now - began)  # fmt: skip
            if now > began + STARTUP:
                raise InputError(f"the draft worker at {self.address} has not loaded in time")

    def check(self) -> None:
        """Raises: InputError: the worker has already refused. Does not wait."""
        if self._connection is not None and self._connection.refused:
            raise InputError(self._trouble(self._connection))

    def take_stream(self) -> Connection | None:
        """The stream of `start`, unless it was taken; an open one keeps the draft loaded."""
        connection, self._connection = self._connection, None
        self._end.detach()
        return connection

    def close(self) -> None:
        """Ends the stream that waited for the worker, unless it was taken."""
        connection = self.take_stream()
        if connection is not None:
            connection.close()

    def _connect(self) -> Connection:
        settings = self._settings
        connection = Connection(self.address, settings.spec, settings.token, Counter(), self.link)
        # Needed even if no one calls `close`: the receiving thread keeps the stream alive.
        self._end.detach()
        self._end = weakref.finalize(self, only_in_owner(connection.close))
        self._end.atexit = False
        return connection

    def _trouble(self, link: Connection) -> str:
        if link.refused:
            return f"the draft worker at {self.address}: {link.trouble}"
        tls = self._files.ca and (
            f"; with TLS its certificate must be for {self._address.host}, still good, and signed "
            f"by one in {self._files.ca}"
        )
        return (
            f"no draft worker answers at {self.address} within {ANSWER_SECONDS:.0f} s"
            f"{link.trouble and f' ({link.trouble})'}; start one there with `ssd-jax draft-worker "
            f"--listen=HOST:{self._address.port}`, and see whether the port is open: "
            f"nc -vz {self._address.host} {self._address.port}{tls or _NO_TLS}"
        )
