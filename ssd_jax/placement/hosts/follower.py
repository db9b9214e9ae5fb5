"""A process that repeats the calls of the leader's engine, and reads only to compare."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ssd_jax import compat
from ssd_jax.errors import InputError, SsdError
from ssd_jax.placement.hosts.comparing import digest_of
from ssd_jax.placement.hosts.facts import of_process
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.start import STREAM, named, own_name, start, waited, words_of
from ssd_jax.roles.protocols import Drafter, Pending, PendingLogprobs, Target
from ssd_jax.roles.records import DraftBatch, Drafted
from ssd_jax.sampling.params import Report
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system.leaving import leave
from ssd_jax.wire import handshake
from ssd_jax.wire.address import Address
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.host_messages import (
    Accept,
    Call,
    End,
    EndEngine,
    Facts,
    Forward,
    Go,
    Greeting,
    HostMessage,
    LeaderSettings,
    LoadReport,
    NewEngine,
    OpenSlot,
    PrefillChunk,
    Propose,
    Refuse,
    Score,
    SeenOutcome,
    SetPages,
    decode,
    encode,
)
from ssd_jax.wire.sockets import connect

_SILENT = 0.9  # of the time-out: how long the leader may be silent; it reports others first
_TOLD = 2.0  # seconds in which the leader tells why a program has failed, if it knows


class HostRoles(Protocol):
    """The roles of an engine; see `loaded.Roles`."""

    @property
    def target(self) -> Target:
        """The target."""
        ...

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, if it is on the target's devices."""
        ...


def join(hosts: str, timeout: float) -> Follower:
    """Joins a leader, and compares the facts that must agree; see `leader.lead`."""
    about = Hosts.parse(hosts)
    follower = Follower(start(about, timeout, follows=True), about, timeout)
    follower.agree(of_process())
    return follower


@dataclasses.dataclass
class _Seat:
    """An engine's roles, and what they made last."""

    roles: HostRoles
    logits: Any = None
    bonus: Any = None
    drafted: Drafted | None = None

    def accept(self, proposal: Any) -> Pending:
        """See `protocols.Target.accept`."""
        pending = self.roles.target.accept(self.logits, proposal)
        self.bonus = pending.bonus
        return pending

    def drafter(self) -> Drafter:
        """The drafter, which exists since the leader calls it."""
        assert self.roles.drafter is not None
        return self.roles.drafter


class Replay:
    """Makes the leader's calls as they come.

    Args:
      make: roles for a mode and K.
    """

    def __init__(self, make: Callable[[str, int], HostRoles]) -> None:
        self._make = make
        self._seats: dict[int, _Seat] = {}
        self._digest = self.calls = 0

    def make(self, call: Call, frame: bytes) -> Pending | PendingLogprobs | None:
        """Makes a call.

        Returns: what it computes that the leader reads, if anything.

        Raises:
          SsdError: the calls before this one were not the leader's.
        """
        if call.before != self._digest:
            raise SsdError(f"after {self.calls} calls it has made others than the leader")
        pending = self._call(call)
        self._digest = zlib.crc32(frame, self._digest)
        self.calls += 1
        return pending

    def _call(self, call: Call) -> Pending | PendingLogprobs | None:
        if isinstance(call, NewEngine):
            self._seats[call.engine] = _Seat(self._make(call.mode, call.k))
            return None
        if isinstance(call, EndEngine):
            del self._seats[call.engine]
            return None
        seat = self._seats[call.engine]
        target, pending = seat.roles.target, None
        if isinstance(call, Forward):
            told = seat.bonus if call.pending is None else call.pending
            drafted = seat.drafted
            if call.proposed is None:
                drafted = None
            elif call.tokens is not None:
                drafted = Drafted(call.proposed, call.tokens)
            seat.logits = target.forward(told, call.lengths, drafted)
            if call.accepts:
                own = None if drafted is None else seat.drafter().proposal()
                pending = seat.accept(own)
        elif isinstance(call, Accept):
            pending = seat.accept(Proposal(*call.proposal))
        elif isinstance(call, Propose):
            seat.drafted = seat.drafter().propose(DraftBatch(*call.batch))
        elif isinstance(call, OpenSlot):
            (target if call.role == "target" else seat.drafter()).open(call.opening)
        elif isinstance(call, SetPages):
            role = target if call.role == "target" else seat.drafter()
            role.set_pages(call.slot, call.pages)
        elif isinstance(call, Score):
            pending = target.score(call.slot, call.tokens)
        elif isinstance(call, PrefillChunk):
            what = call.slot, call.tokens, call.offset
            if call.role == "drafter":
                seat.drafter().prefill(*what, last=call.last)
            elif call.last:
                pending = target.prefill_last(*what)
            else:
                target.prefill(*what)
        return pending


class Follower:
    """A follower's view of the leader. Whatever ends the job ends this process.

    Args:
      job: the job of all processes.
      hosts: how long to wait for the leader.
      timeout, leave: see `Leader`.

    Raises:
      InputError: the leader cannot be reached.
    """

    def __init__(
        self,
        job: compat.Job,
        hosts: Hosts,
        timeout: float,
        *,
        leave: Callable[[str, int], None] = leave,
    ) -> None:
        self._job, self._leave, self._ended = job, leave, False
        try:
            host, port, token = self._job.get(STREAM, hosts.joining).split(" ")
        except RuntimeError as error:
            raise InputError(
                f"hosts: the leader has not said where it listens: {error}; waited {waited(hosts)}"
            ) from None
        self._address = str(Address(host, int(port)))
        try:
            self._link = Frames(connect(self._address, timeout), _SILENT * timeout)
            handshake.enter(self._link, token.encode(), timeout)
        except handshake.RefusedError as error:
            raise InputError(f"hosts: the leader at {self._address} refused: {error}") from None
        except OSError as error:
            raise InputError(
                f"hosts: the leader does not listen at {self._address}: "
                f"{error.strerror or error}; see that the port is open, or name it by stream= in "
                "the leader's hosts"
            ) from None
        self._told: queue.SimpleQueue[tuple[Any, bytes]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[int, Pending | PendingLogprobs]]
        self._outcomes = queue.SimpleQueue()
        self._link.send(encode(Greeting(self._job.index, own_name())))
        self._link.start(self._take, self._lose)

    def agree(self, values: Mapping[str, Any]) -> None:
        """See `Leader.agree`."""
        self._send(Facts({name: str(value) for name, value in values.items()}))
        self._expect(Go)

    def settings(self) -> LeaderSettings:
        """What the leader wants to be opened."""
        return self._expect(LeaderSettings)

    def fail(self, error: BaseException) -> None:
        """Tells the leader that this process cannot go on; ends with its message to all."""
        status = error.exit_status if isinstance(error, SsdError) else SsdError.exit_status
        self._give_up(words_of(error), status)

    def follow(self, make: Callable[[str, int], HostRoles], load: Callable[[Report], None]) -> None:
        """Makes the leader's calls until it needs no more.

        Args:
          make: roles for a mode and K.
          load: loads the programs of a report.
        """
        replay = Replay(make)
        threading.Thread(target=self._compare, daemon=True, name="outcomes").start()
        while True:
            message, frame = self._told.get()
            if isinstance(message, End):
                compat.leave_job()
                return
            if isinstance(message, LoadReport):
                about = load, message.report
                threading.Thread(target=self._load, args=about, daemon=True, name="load").start()
            if isinstance(message, LoadReport | Go):  # a `Go` ends the leader's wait for a load
                continue
            try:
                pending = replay.make(message, frame)
                if isinstance(message, NewEngine):
                    self.agree({"engine": message.engine})
            except Exception as error:
                self._give_up(words_of(error), SsdError.exit_status)
                return
            if pending is not None:
                self._outcomes.put((replay.calls, pending))

    def _load(self, load: Callable[[Report], None], report: Report) -> None:
        try:
            load(report)
            self._send(Facts({"loaded": report}))
        except Exception as error:
            self._give_up(words_of(error), SsdError.exit_status)

    def close(self) -> None:
        """Leaves the job."""
        self._link.close()

    def _compare(self) -> None:
        """Sends the leader the checksums of the calls' outcomes."""
        try:
            while True:
                call, pending = self._outcomes.get()
                self._send(SeenOutcome(call, digest_of(pending.read())))
        except Exception as error:
            self._give_up(words_of(error), SsdError.exit_status)

    def _expect(self, kind: type[Any]) -> Any:
        message, _ = self._told.get()
        if isinstance(message, End):
            self._leave("", 0)
        if not isinstance(message, kind):
            self._lose(f"it has sent {type(message).__name__} in place of {kind.__name__}")
        return message

    def _take(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Refuse):
            self._leave(message.why, message.status)
        if isinstance(message, End):
            self._ended = True
            self._link.close()  # so that the leader's closing counts as no loss
        self._told.put((message, frame))

    def _lose(self, why: str) -> None:
        self._leave(
            f"{named(0, self._job.count, f'the leader, {self._address}')} is lost: {why}",
            SsdError.exit_status,
        )

    def _give_up(self, why: str, status: int) -> None:
        """Reports `why` to the leader; ends with its message, or with `why` if it sends none."""
        self._send(Refuse(why, status))
        time.sleep(_TOLD)
        self._leave(f"{named(self._job.index, self._job.count, own_name())}: {why}", status)

    def _send(self, message: HostMessage) -> None:
        try:
            self._link.send(encode(message))
        except OSError as error:
            if not self._ended:  # the end may be told next
                time.sleep(_TOLD)
            if not self._ended:
                self._lose(error.strerror or str(error))
