"""The engine's end of a stream to a worker, and when another stream is tried."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from ssd_jax.placement.process.work_log import WorkLog
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.records import BranchTokens, BranchTrees, no_branches
from ssd_jax.system.files import printable
from ssd_jax.wire import codec
from ssd_jax.wire.draft_spec import DraftMessage, DraftSpec
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import (
    BranchMessage,
    ExpandMessage,
    RecordMessage,
    RecordTokens,
    Refused,
    RoundAnswer,
    Welcome,
)
from ssd_jax.wire.stream import OpenStream, Stream, StreamError, message_size

_RETRY, _LONGEST_RETRY = 0.2, 10.0  # seconds between attempts to connect
_STEADY = 60.0  # seconds after which the end of a stream counts as chance
_T = TypeVar("_T")
_POLL = 1e-3  # seconds


class OwnedBranches(NamedTuple):
    """The last answer to an expansion.

    Attributes:
      epochs: [B] int32, epochs of the requests that own the branches; -1 where a slot has none.
      complete: whether this is all.
    """

    epochs: np.ndarray
    branches: BranchTokens
    complete: bool

    def for_epochs(self, epochs: np.ndarray) -> BranchTokens:
        """The branches of the requests now in the slots."""
        stale = (self.epochs != epochs) & (self.epochs >= 0)
        if not stale.any():
            return self.branches
        branches = self.branches
        return branches._replace(
            bonus=np.where(stale[:, None], -1, branches.bonus),
            lengths=np.where(stale[:, None], 0, branches.lengths),
        )


class Link(NamedTuple):
    """How a worker is reached.

    Attributes:
      open: opens a stream.
      shares_clock: whether its clock is this host's.
    """

    open: OpenStream = Stream
    shares_clock: bool = True


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
        spec: DraftSpec,
        token: str,
        counters: Counter[str],
        link: Link = Link(),  # noqa: B008 (immutable)
    ) -> None:
        self._spec, self.counters = spec, counters
        self._work = WorkLog(shares_clock=link.shares_clock)
        self._changed = threading.Condition()
        self._record_number = self._expand_number = 0  # of the last messages that ask
        self._branches: OwnedBranches | None = None
        self._record_tokens: RecordTokens | None = None
        self.alive, self.ready, self.refused = True, False, False
        self.trouble = ""
        self.stream = link.open(address, token, message_size(spec))
        self.send(spec)
        try:
            threading.Thread(target=self._receive, name="draft answers", daemon=True).start()
        except RuntimeError as error:  # the host has none left
            self.alive, self.trouble = False, f"no stream could be opened: {error}"
            self.stream.close()

    def send(self, message: DraftMessage) -> None:
        """Sends a message, as `Stream.send`."""
        data = codec.encode(message)
        self._work.add_bytes(len(data))
        self.stream.send(data)

    def ask_records(self, message: RecordMessage) -> None:
        """Sends new records; answers to earlier messages are no longer kept."""
        with self._changed:
            self._record_number, self._expand_number = message.number, 0
            self._branches = self._record_tokens = None
        self._work.clock.record_request(message.number, first=True)
        self.send(message)

    def ask_branches(self, message: ExpandMessage) -> None:
        """Sends an expansion of the last records."""
        with self._changed:
            self._expand_number = message.number
        self._work.clock.record_request(message.number)
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
            is_enough = latest is not None and (
                latest.complete or latest.branches.forwards >= forwards
            )
            return latest if is_enough else None

        if until is None and enough() is None:
            self._wait(enough, timeout)
        while until is not None and enough() is None and self.alive:
            if until():
                return None
            self._wait(enough, _POLL)
        return self._branches

    def record_tokens(self, timeout: float) -> RecordTokens | None:
        """The answer to the last records; None if it does not come in time."""
        return self._wait(lambda: self._record_tokens, timeout)

    def activity(self, epochs: np.ndarray) -> Activity:
        """What the worker has done since the last call, for the requests of these `epochs`."""
        return self._work.take(epochs)

    def wait_ready(self, timeout: float) -> bool:
        """Waits for the worker to agree to the `DraftSpec`."""
        self._wait(lambda: self.ready or None, timeout)
        return self.ready

    def close(self) -> None:
        """Ends the stream."""
        self.alive = False
        self.stream.close()

    def _wait(self, answer: Callable[[], _T | None], timeout: float) -> _T | None:
        with self._changed:
            self._changed.wait_for(lambda: answer() is not None or not self.alive, timeout)
            return answer()

    def _receive(self) -> None:
        trouble, refused = "the worker ended the stream", False
        try:
            for data in self.stream.answers():
                self._work.add_bytes(len(data))
                message = codec.decode(data, self._spec)
                if isinstance(message, Refused):
                    refused = not self.ready
                    trouble = f"the worker refused: {message.reason}"
                    break
                with self._changed:
                    self._handle(message)
                    self._changed.notify_all()
        except ProtocolError as error:
            self.counters["garbage"] += 1
            trouble = f"the worker sent {error}"
        except StreamError as error:
            refused = error.refused
            trouble = f"{'the worker refused' if refused else 'the stream broke'}: {error}"
        except Exception as error:  # whatever it is, no one may go on waiting for answers
            self.counters["garbage"] += 1
            trouble = f"an answer of the worker could not be taken: {error!r}"
        finally:
            with self._changed:
                self.trouble = printable(trouble)  # the worker may say anything
                self.refused, self.alive = refused, False  # who sees these sees why
                self._changed.notify_all()
            self.stream.close()

    def _handle(self, message: DraftMessage) -> None:
        if isinstance(message, Welcome):
            self.ready = True
        elif isinstance(message, RoundAnswer):
            self._work.add(message)
            request_number = (
                self._record_number if isinstance(message, RecordTokens) else self._expand_number
            )
            if message.number < max(request_number, self._record_number):
                self.counters["overtaken"] += 1
            elif message.number > request_number or self._is_replay(message):
                self.counters["ignored"] += 1
            elif isinstance(message, RecordTokens):
                self._record_tokens = message
            elif isinstance(message, BranchMessage):
                self._branches = self._by_slot(message)
        else:
            raise ProtocolError(f"a {type(message).__name__}, which is not for an engine")

    def _is_replay(self, message: RoundAnswer) -> bool:
        """Whether the same answer came before: what has been used must not change."""
        if isinstance(message, RecordTokens):
            return self._record_tokens is not None
        return self._branches is not None and self._branches.complete

    def _by_slot(self, message: BranchMessage) -> OwnedBranches:
        """An answer arranged by slots, ready to be used."""
        spec, slots, forwards = self._spec, message.slots, message.forwards
        if slots.tolist() == [*range(spec.slots)]:
            arrays = message.bonus, message.lengths, message.tokens, message.confidence
            trees = BranchTrees(message.node, message.parents) if spec.nodes else None
            branches = BranchTokens(*arrays, forwards, trees=trees)
            return OwnedBranches(message.epochs, branches, message.complete)
        branches = no_branches(spec.slots, spec.branches, spec.k, forwards, spec.nodes)
        epochs = np.full(spec.slots, -1, np.int32)
        epochs[slots] = message.epochs
        for name in ("bonus", "lengths", "tokens", "confidence"):
            getattr(branches, name)[slots] = getattr(message, name)
        if branches.trees is not None:
            branches.trees.node[slots] = message.node
            branches.trees.parents[slots] = message.parents
        return OwnedBranches(epochs, branches, message.complete)


def connector(
    spec: DraftSpec,
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
    last_time, pause, last_address = -float("inf"), 0.0, ""

    def connect() -> Connection | None:
        nonlocal first, last_time, pause, last_address
        opened, first = first, None
        if opened is not None and opened.alive:
            opened.counters = counters
            return opened
        current, now = address(), clock()
        is_same = current == last_address
        if current is None or (is_same and now < last_time + pause):
            return None
        is_repeated = is_same and now < last_time + pause + _STEADY
        pause = min(2 * pause, _LONGEST_RETRY) if is_repeated else _RETRY
        last_time, last_address = now, current
        return Connection(current, spec, token, counters, link)

    return connect
