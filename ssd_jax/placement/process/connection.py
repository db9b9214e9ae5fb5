"""The engine's end of a stream; when another is tried, and when a worker counts as hanging."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.roles.records import BranchTokens, no_branches
from ssd_jax.system.files import printable
from ssd_jax.wire import codec
from ssd_jax.wire.messages import (
    BranchMessage,
    DraftMessage,
    DraftSpec,
    ExpandMessage,
    ProtocolError,
    RecordMessage,
    RecordTokens,
    Refused,
    RoundAnswer,
    Welcome,
)
from ssd_jax.wire.stream import OpenStream, Stream, StreamError, message_size

HANG = 30.0
"""Seconds that an answer may take."""
SILENCE = 1.5
"""Seconds that a sign of life may take: a worker accepts streams even while it computes."""
_STEP = 1.0  # seconds
_RETRY, _LONGEST_RETRY = 0.2, 10.0  # seconds between attempts to connect
_STEADY = 60.0  # seconds after which the end of a stream counts as chance
_T = TypeVar("_T")
_KEPT = 1024  # most spans of work that are kept until they are asked for
_LOOK = 1e-3  # seconds
_LATELY = 64  # answers


class OwnedBranches(NamedTuple):
    """The last answer to an expansion.

    Attributes:
      epochs: [B] int32, epochs of the requests that own the branches; -1 where a slot has none.
      complete: whether this is all.
    """

    epochs: np.ndarray
    branches: BranchTokens
    complete: bool

    def of(self, epochs: np.ndarray) -> BranchTokens:
        """The branches of the requests now in the slots."""
        stale = (self.epochs != epochs) & (self.epochs >= 0)
        if not stale.any():
            return self.branches
        found = self.branches
        return found._replace(
            bonus=np.where(stale[:, None], -1, found.bonus),
            lengths=np.where(stale[:, None], 0, found.lengths),
        )


class Link(NamedTuple):
    """How a worker is reached.

    Attributes:
      open: opens a stream.
      clock: whether its clock is this host's.
    """

    open: OpenStream = Stream
    clock: bool = True


class Connection:
    """A stream to a worker: sends without waiting, and keeps requested answers.

    Args:
      address: of the worker.
      token: secret that the worker was started with.
      counters: count ignored messages and broken streams.
      link: how the worker is reached.

    Attributes:
      counters: see above.
      stream: carries the messages.
      alive: whether the connection has not failed; a failure is final.
      ready: whether the worker has agreed to the `DraftSpec`.
      refused: whether it failed because the worker did not agree.
      trouble: why it failed.
    """

    def __init__(
        self,
        address: str,
        hello: DraftSpec,
        token: str,
        counters: Counter[str],
        link: Link = Link(),  # noqa: B008 (immutable)
    ) -> None:
        self._hello, self.counters = hello, counters
        self._clock = _FarClock(shared=link.clock)
        self._work: deque[tuple[Busy, RoundAnswer]] = deque(maxlen=_KEPT)  # with the answers
        self._worked_until = 0.0
        self._sent = self._received = 0  # bytes; each is changed by one thread only
        self._counted = 0
        self._changed = threading.Condition()
        self._record_number = self._expand_number = 0  # of the last messages that ask
        self._branches: OwnedBranches | None = None
        self._record_tokens: RecordTokens | None = None
        self.alive, self.ready, self.refused = True, False, False
        self.trouble = ""
        self.stream = link.open(address, token, message_size(hello))
        self.send(hello)
        try:
            threading.Thread(target=self._receive, name="draft answers", daemon=True).start()
        except RuntimeError as error:  # the host has none left
            self.alive, self.trouble = False, f"no stream could be opened: {error}"
            self.stream.close()

    def send(self, message: DraftMessage) -> None:
        """Sends a message; see `stream.Stream.send`."""
        data = codec.encode(message)
        self._sent += len(data)
        self.stream.send(data)

    def ask_records(self, message: RecordMessage) -> None:
        """Sends new records; answers to earlier messages are no longer kept."""
        with self._changed:
            self._record_number, self._expand_number = message.number, 0
            self._branches = self._record_tokens = None
        self._clock.asked(message.number, first=True)
        self.send(message)

    def ask_branches(self, message: ExpandMessage) -> None:
        """Sends an expansion of the last records."""
        with self._changed:
            self._expand_number = message.number
        self._clock.asked(message.number)
        self.send(message)

    @property
    def answered(self) -> bool:
        """Whether the worker has answered since the last records were sent, if it was asked."""
        answers = self._branches, self._record_tokens
        return not self._record_number or any(answer is not None for answer in answers)

    def branches(
        self, forwards: int, timeout: float, until: Callable[[], bool] | None = None
    ) -> OwnedBranches | None:
        """The answer to the last expansion after `forwards` forwards, or the complete one.

        Args:
          timeout: seconds to wait, after which the latest answer is returned.
          until: checked in place of the timeout; None is returned once it is true.
        """

        def enough() -> OwnedBranches | None:
            latest = self._branches
            done = latest is not None and (latest.complete or latest.branches.forwards >= forwards)
            return latest if done else None

        if until is None and enough() is None:
            self._wait(enough, timeout)
        while until is not None and enough() is None and self.alive:
            if until():
                return None
            self._wait(enough, _LOOK)
        return self._branches

    def record_tokens(self, timeout: float) -> RecordTokens | None:
        """The answer to the last records; None if it does not come in time."""
        return self._wait(lambda: self._record_tokens, timeout)

    def activity(self, epochs: np.ndarray) -> Activity:
        """What the worker has done since the last call, for the requests of these `epochs`."""
        with self._changed:
            work, total = list(self._work), self._sent + self._received
            self._work.clear()
        count, self._counted = total - self._counted, total
        return Activity(
            tuple(
                span._replace(slots=by.slots[epochs[by.slots] == by.epochs].tolist())
                for span, by in work
            ),
            count,
            self._clock.round_trip,
        )

    def wait_ready(self, timeout: float) -> bool:
        """Waits for the worker to agree to the `DraftSpec`."""
        self._wait(lambda: self.ready or None, timeout)
        return self.ready

    def close(self) -> None:
        """Ends the stream."""
        self.alive = False
        self.stream.close()

    def _wait(self, found: Callable[[], _T | None], timeout: float) -> _T | None:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not self.alive, timeout)
            return found()

    def _receive(self) -> None:
        trouble = "the worker ended the stream"
        try:
            for data in self.stream.answers():
                self._received += len(data)
                message = codec.decode(data, self._hello)
                if isinstance(message, Refused):
                    self.refused = not self.ready
                    trouble = f"the worker refused: {message.reason}"
                    break
                with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        except ProtocolError as error:
            self.counters["garbage"] += 1
            trouble = f"the worker sent {error}"
        except StreamError as error:
            self.refused = error.refused
            trouble = f"{'the worker refused' if self.refused else 'the stream broke'}: {error}"
        except Exception as error:  # whatever it is, no one may go on waiting for answers
            self.counters["garbage"] += 1
            trouble = f"an answer of the worker could not be taken: {error!r}"
        finally:
            with self._changed:
                self.alive = False
                self.trouble = printable(trouble)  # the worker may say anything
                self._changed.notify_all()
            self.stream.close()

    def _take(self, message: DraftMessage) -> None:
        if isinstance(message, Welcome):
            self.ready = True
        elif isinstance(message, RoundAnswer):
            self._take_work(message)
            asked = (
                self._record_number if isinstance(message, RecordTokens) else self._expand_number
            )
            if message.number < max(asked, self._record_number):
                self.counters["overtaken"] += 1
            elif message.number > asked or self._replayed(message):
                self.counters["ignored"] += 1
            elif isinstance(message, RecordTokens):
                self._record_tokens = message
            elif isinstance(message, BranchMessage):
                self._branches = self._arranged(message)
        else:
            raise ProtocolError(f"a {type(message).__name__}, which is not for an engine")

    def _take_work(self, message: RoundAnswer) -> None:
        """Keeps the work that an answer reports; repeated reports count once."""
        now = time.perf_counter()  # work ended before it was reported, whatever it says
        later = self._clock.answered(message, now)
        for each in message.work:
            if each.begin >= self._worked_until:
                begin, end = min(each.begin + later, now), min(each.end + later, now)
                span = Busy(each.kind, begin, end)
                self._work.append((span, message))
                self._worked_until = each.end

    def _replayed(self, message: RoundAnswer) -> bool:
        """Whether the same answer came before: what has been used must not change."""
        if isinstance(message, RecordTokens):
            return self._record_tokens is not None
        return self._branches is not None and self._branches.complete

    def _arranged(self, message: BranchMessage) -> OwnedBranches:
        """An answer arranged by slots, ready to be used."""
        hello, slots, forwards = self._hello, message.slots, message.forwards
        if slots.tolist() == [*range(hello.slots)]:
            arrays = message.bonus, message.lengths, message.tokens, message.confidence
            return OwnedBranches(message.epochs, BranchTokens(*arrays, forwards), message.complete)
        branches = no_branches(hello.slots, hello.branches, hello.k, forwards)
        epochs = np.full(hello.slots, -1, np.int32)
        epochs[slots] = message.epochs
        for name in ("bonus", "lengths", "tokens", "confidence"):
            getattr(branches, name)[slots] = getattr(message, name)
        return OwnedBranches(epochs, branches, message.complete)


class _FarClock:
    """A worker's clock, and how long messages take.

    Args:
      shared: whether the clock may be this host's, until an answer contradicts it: at the end of a
        tunnel is another host. If not, its times are converted to those at which an answer sent
        then would have arrived, judging by the fastest recent one. They thus include the way here,
        which waiting for the next answer includes, too.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._asked: dict[int, float] = {}  # when messages of this round were sent, by number
        self._later: deque[float] = deque(maxlen=_LATELY)
        self._trips: deque[float] = deque(maxlen=_LATELY)

    def asked(self, number: int, *, first: bool = False) -> None:
        """Records that a message is sent now (`first`: of a round)."""
        self._asked = {} if first else dict(self._asked)
        self._asked[number] = time.perf_counter()

    def answered(self, message: RoundAnswer, now: float) -> float:
        """Records an answer. Returns what to add to its times."""
        self._later.append(now - message.sent)
        asked = self._asked.get(message.number)
        self._shared &= message.sent <= now and (asked is None or message.received >= asked)
        if asked is not None:
            self._trips.append(max(now - asked - (message.sent - message.received), 0.0))
        return 0.0 if self._shared else min(self._later)

    @property
    def round_trip(self) -> float | None:
        """Round-trip seconds of the fastest recent answer."""
        return min(self._trips, default=None)


def connector(
    hello: DraftSpec,
    token: str,
    address: Callable[[], str | None],
    counters: Counter[str],
    *,
    link: Link = Link(),  # noqa: B008 (immutable)
    first: Connection | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], Connection | None]:
    """Returns a function that connects to `address()`, or gives None: there is none, or just tried.

    While streams keep breaking at the same address, the pause before the next one doubles. If
    `first` is given and alive, it comes before others.
    """
    last, pause, tried = -float("inf"), 0.0, ""

    def connect() -> Connection | None:
        nonlocal first, last, pause, tried
        given, first = first, None
        if given is not None and given.alive:
            given.counters = counters
            return given
        where, now = address(), clock()
        same = where == tried
        if where is None or (same and now < last + pause):
            return None
        again = same and now < last + pause + _STEADY
        pause = min(2 * pause, _LONGEST_RETRY) if again else _RETRY
        last, tried = now, where
        return Connection(where, hello, token, counters, link)

    return connect


class HangLimit:
    """A time limit in seconds that doubles each time it is reached.

    So a worker that is only slow, perhaps with a long prompt, finishes in spite of restarts. Time
    counts only while it is checked, at most a second between two checks: a worker cannot be heard
    while its engine is idle or the whole host is asleep.

    Args:
      seconds: the first limit.
      forgets: whether the limit returns to the first one after a wait shorter than that.
    """

    def __init__(
        self,
        seconds: float = HANG,
        *,
        forgets: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = self._seconds = seconds
        self._forgets, self._clock = forgets, clock
        self._by: str | None = None
        self._waited = self._looked = 0.0

    def settled(self) -> None:
        """Records that nothing is owed."""
        if self._by is not None and self._forgets and self._waited < self._first:
            self._seconds = self._first
        self._by = None

    def reached(self, by: str) -> bool:
        """Whether the worker at address `by`, which owes something, has owed it for too long. Time
        counts from the first check since `settled`, or since a check of another worker. If the
        limit is reached, the debt is settled."""
        now = self._clock()
        if self._by != by:
            self._by, self._waited, self._looked = by, 0.0, now
        self._waited += min(now - self._looked, _STEP)
        self._looked = now
        if self._waited < self._seconds:
            return False
        self._seconds *= 2
        self._by = None
        return True
