"""The streams to a worker, one at a time: a new one after the last has ended, none to be used while
an answer is overdue, and an end to a worker that hangs."""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.hang_limit import SILENCE, HangLimit
from ssd_jax.roles.records import Absence
from ssd_jax.system.forks import only_in_owner

_POLL = 0.1  # seconds
_LOG = logging.getLogger(__name__)


class WorkerStreams:
    """Streams to one worker after another, wherever it is.

    Args:
      connect: returns a new connection; None if there is no worker now.
      counters: counts of events: "late", "stale", "dead", "hung", "connections", and those of a
        `Connection`.
      address: returns the address of the current worker; None if there is none.
      end: ends the hanging worker at an address; None if this object may not end it.

    Attributes:
      current: the current stream, or the last one; None if there never was a worker.
      overdue: whether an awaited answer did not come.
      absence: why there is no answer, if there is none.
      limit: how long an answer may be owed before the worker counts as hanging.
      silence: the same for a sign of life.
      close: ends the current stream.
    """

    def __init__(
        self,
        connect: Callable[[], Connection | None],
        counters: Counter[str],
        address: Callable[[], str | None] = lambda: None,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self.current: Connection | None = None
        self.overdue = False
        self.absence: Absence = "dead"
        self.connect, self.counters = connect, counters
        self.limit, self.silence = HangLimit(), HangLimit(SILENCE, forgets=True)
        self._address, self._end = address, end
        self._last_ended: Connection | None = None
        self._trouble = self._logged_trouble = ""
        self._hang_logged = self._absence_counted = False
        self.close: Callable[[], Any] = lambda: None

    def usable(self) -> Connection | None:
        """The stream, unless an answer is overdue; connects anew if need be."""
        if self.current is None or not self.current.alive:
            if self.current is not None:
                self.close()
                self._log_end(self.current)
                self._last_ended = self.current
            self.current = self.connect()
            if self.current is not None:
                # Needed even if no one calls `close`: the receiving thread keeps the stream alive.
                self.close = end = weakref.finalize(self, only_in_owner(self.current.close))
                end.atexit = False
            self.overdue = False
            self.counters["connections"] += self.current is not None
        link = self.current
        if link is None or not link.ready:
            self.absence = "dead"
        elif self.overdue and not link.answered:
            self.absence = "stale"
        else:
            self.overdue = self._hang_logged = False
            self.limit.clear()
            self.silence.clear()
            return link
        self._end_if_it_hangs(link or self._last_ended)
        return None

    def wait_ready(self, timeout: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Waits for a worker that agrees to the `DraftSpec`, even if it restarts meanwhile; at most
        until `until` is true."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and not self.refused and not until():
            if self.usable() is not None:
                return True
            if self.current is None or not self.current.alive:
                time.sleep(_POLL)
            else:
                self.current.wait_ready(_POLL)
        return False

    @property
    def refused(self) -> bool:
        """Whether the worker does not agree to the `DraftSpec`."""
        return self.current is not None and self.current.refused

    @property
    def trouble(self) -> str:
        """Why the last ended stream has ended."""
        return (self.current and self.current.trouble) or self._trouble

    def new_round(self) -> None:
        """Begins a round, in which a missing answer is counted again."""
        self._absence_counted = False

    def give_up(self, link: Connection) -> None:
        """Records that an awaited answer on this stream did not come."""
        self.absence = "late" if link.alive else "dead"
        self.overdue = link.alive

    def count_absence(self) -> None:
        """Counts why a round has no answer: once, even if the round waited twice."""
        if not self._absence_counted:
            self.counters[self.absence] += 1
        self._absence_counted = True

    def _end_if_it_hangs(self, link: Connection | None) -> None:
        """Ends a worker that has owed something for too long, over any number of streams.

        Args:
          link: the last stream to it.
        """
        address = self._address()
        if address is None or (link is not None and link.refused):  # no worker, or one that answers
            self.limit.clear()
            self.silence.clear()
            return
        is_admitted = link is not None and link.stream.admitted
        if is_admitted:
            self.silence.clear()
        is_silent = not is_admitted and self.silence.reached(address)
        if is_silent or self.limit.reached(address):
            self.counters["hung"] += 1
            problem = "gives no sign of life" if is_silent else "has not answered for long"
            remedy = "another stream is tried" if self._end is None else "another is started"
            level = logging.DEBUG if self._hang_logged and self._end is None else logging.WARNING
            self._hang_logged = True
            _LOG.log(level, "the draft worker %s; %s", problem, remedy)
            if self._end is not None:
                self._end(address)
            if link is not None:
                link.close()

    def _log_end(self, link: Connection) -> None:
        """Logs once why streams end: more that end for the same reason follow at once."""
        self._trouble = link.trouble or self._trouble
        is_repeated = self._logged_trouble == self._trouble and not link.ready
        level = logging.DEBUG if is_repeated else logging.WARNING
        _LOG.log(level, "the stream to the draft worker has ended: %s", self._trouble)
        self._logged_trouble = self._trouble
