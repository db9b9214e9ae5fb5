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

ANSWER = 10.0
"""Seconds within which a worker must give a sign of life."""
_REMINDER = 60.0  # seconds between log lines while it loads
_NO_TLS = "; a worker that says (TLS) when it starts needs draft_tls_ca and draft_token_file here"
_LOG = logging.getLogger(__name__)


class FarWorker:
    """See `process.placement.Worker`. The worker loads what is wanted while the target compiles.

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
        self._settings, self._where, self._files = settings, address, files
        self.link = Link(
            open=functools.partial(Stream, tls=files.engine_context()),
            clock=address.loopback,
        )
        self._first: Connection | None = None
        self._end = weakref.finalize(self, lambda: None)

    def start(self) -> None:
        """Asks the worker to load; returns at once."""
        self._first = self._connect()

    hold = start
    """See `process.placement.Worker`."""

    def wait_ready(self) -> None:
        """Waits until the worker has loaded.

        Raises:
          InputError: no worker answers at the address, or it refuses.
        """
        began = told = time.monotonic()
        while self._first is not None and not self._first.wait_ready(1.0):
            now = time.monotonic()
            if not self._first.alive:
                if self._first.refused or now > began + ANSWER:
                    raise InputError(self._trouble(self._first))
                time.sleep(0.2)
                self._first.close()
                self._first = self._connect()
            elif not self._first.stream.admitted and now > began + ANSWER:
                raise InputError(self._trouble(self._first))
            elif now > told + _REMINDER:
                told = now
                _LOG.warning("the draft worker at %s still loads after %.0f s", self.address,
                             now - began)  # fmt: skip
            if now > began + STARTUP:
                raise InputError(f"the draft worker at {self.address} has not loaded in time")

    def check(self) -> None:
        """Raises: InputError: the worker has already refused. Does not wait."""
        if self._first is not None and self._first.refused:
            raise InputError(self._trouble(self._first))

    def take_stream(self) -> Connection | None:
        """See `process.placement.Worker`. While it is open, the worker keeps the draft."""
        first, self._first = self._first, None
        self._end.detach()
        return first

    def close(self) -> None:
        """Ends the stream that waited for the worker, unless it was taken."""
        first = self.take_stream()
        if first is not None:
            first.close()

    def _connect(self) -> Connection:
        settings = self._settings
        made = Connection(self.address, settings.spec, settings.token, Counter(), self.link)
        # Needed even if no one calls `close`: the receiving thread keeps the stream alive.
        self._end.detach()
        self._end = weakref.finalize(self, only_in_owner(made.close))
        self._end.atexit = False
        return made

    def _trouble(self, link: Connection) -> str:
        if link.refused:
            return f"the draft worker at {self.address}: {link.trouble}"
        tls = self._files.ca and (
            f"; with TLS its certificate must be for {self._where.host}, still good, and signed by "
            f"one in {self._files.ca}"
        )
        return (
            f"no draft worker answers at {self.address} within {ANSWER:.0f} s"
            f"{link.trouble and f' ({link.trouble})'}; start one there with `ssd-jax draft-worker "
            f"--listen=HOST:{self._where.port}`, and see whether the port is open: "
            f"nc -vz {self._where.host} {self._where.port}{tls or _NO_TLS}"
        )
