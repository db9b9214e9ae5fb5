"""A process that repeats the calls of the leader's engine, and reads only to compare."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ssd_jax import compat
from ssd_jax.errors import InputError, SsdError
from ssd_jax.placement.hosts.comparing import digest_of
from ssd_jax.placement.hosts.facts import process_facts
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.job_state import CallLog
from ssd_jax.placement.hosts.start import (
    STREAM,
    describe_error,
    host_name,
    process_name,
    start,
    wait_hint,
)
from ssd_jax.roles.protocols import Drafter, Pending, PendingLogprobs, Target
from ssd_jax.roles.records import DraftBatch, Drafted
from ssd_jax.sampling.params import Extra
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system.leaving import leave
from ssd_jax.wire import handshake
from ssd_jax.wire.address import Address
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.host_messages import (
    Call,
    End,
    Facts,
    Go,
    Greeting,
    HostMessage,
    LeaderSettings,
    LoadExtra,
    Refuse,
    SeenOutcome,
    decode,
    encode,
)
from ssd_jax.wire.sockets import connect

_SILENCE_SHARE = 0.9  # of the time-out: how long the leader may be silent; it reports others first
_REPORT_WAIT = 2.0  # seconds in which the leader sends why a program has failed, if it knows


class HostRoles(Protocol):
    """The roles of an engine, as `loaded.Roles`."""

    @property
    def target(self) -> Target:
        """The target."""
        ...

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, if it is on the target's devices."""
        ...


def join(setting: str, timeout: float) -> Follower:
    """Joins a leader, and compares the facts that must agree, as `leader.lead` does."""
    hosts = Hosts.parse(setting)
    follower = Follower(start(hosts, timeout, follows=True), hosts, timeout)
    follower.agree(process_facts())
    return follower


class _Engine:
    """An engine's roles, and what they made last."""

    def __init__(self, roles: HostRoles) -> None:
        self._roles = roles
        self._logits: Any = None
        self._bonus: Any = None
        self._drafted: Drafted | None = None

    def call(self, role: str, method: str, arguments: Sequence[Any]) -> Any:
        """Makes a call with the arguments that `CALLS` describes."""
        method_here = getattr(self, f"_{role}_{method}", None)
        local = self._roles.target if role == "target" else self._drafter
        return (method_here or getattr(local, method))(*arguments)

    @property
    def _drafter(self) -> Drafter:
        assert self._roles.drafter is not None  # the leader has one, too
        return self._roles.drafter

    def _drafter_prefill(self, slot: int, tokens: list[int], offset: int, last: bool) -> None:
        self._drafter.prefill(slot, tokens, offset, last=last)

    def _drafter_propose(self, batch: Sequence[np.ndarray]) -> None:
        self._drafted = self._drafter.propose(DraftBatch(*batch))

    def _target_forward(
        self,
        pending: np.ndarray | None,
        lengths: np.ndarray,
        counts: np.ndarray | None,
        tokens: np.ndarray | None,
        parents: np.ndarray | None,
    ) -> None:
        drafted = None
        if counts is not None:
            drafted = self._drafted if tokens is None else Drafted(counts, tokens, parents=parents)
        tokens_in = self._bonus if pending is None else pending
        assert tokens_in is not None  # the leader looks ahead of a round that it has begun
        self._logits = self._roles.target.forward(tokens_in, lengths, drafted)

    def _target_read_tokens(self) -> None:
        assert self._drafted is not None  # the leader reads those of a drafter that all hosts have
        self._roles.target.read_tokens(self._drafted)

    def _target_accept(
        self, arrays: Sequence[np.ndarray] | None, drafted: bool, masks: np.ndarray | None
    ) -> Pending:
        proposal = None if arrays is None else Proposal(*arrays)
        if drafted:
            proposal = self._drafter.proposal()
        pending = self._roles.target.accept(self._logits, proposal, masks)
        self._bonus = pending.bonus
        return pending


class Replay:
    """Makes the leader's calls as they come.

    Args:
      make: roles for a mode and K.
    """

    def __init__(self, make: Callable[[str, int], HostRoles]) -> None:
        self._make = make
        self._engines: dict[int, _Engine] = {}
        self.calls = CallLog()

    def make(self, call: Call, frame: bytes) -> Pending | PendingLogprobs | None:
        """Makes a call.

        Returns: what it computes that the leader reads, if anything.

        Raises:
          SsdError: the calls before this one were not the leader's.
        """
        if call.history != self.calls.digest:
            raise SsdError(f"after {self.calls.count} calls it has made others than the leader")
        pending = self._call(call)
        self.calls.add(frame)
        return pending

    def _call(self, call: Call) -> Pending | PendingLogprobs | None:
        if call.role != "engine":
            return self._engines[call.engine].call(call.role, call.method, call.arguments)
        if call.method == "make":
            self._engines[call.engine] = _Engine(self._make(*call.arguments))
        else:
            del self._engines[call.engine]
        return None


class Follower:
    """A follower's view of the leader. Whatever ends the job ends this process.

    Args:
      job: the job of all processes.
      hosts: how long to wait for the leader.
      timeout, leave: as for `Leader`.

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
                f"hosts: the leader has not said where it listens: {error}; waited "
                f"{wait_hint(hosts)}"
            ) from None
        self._address = str(Address(host, int(port)))
        try:
            self._link = Frames(connect(self._address, timeout), _SILENCE_SHARE * timeout)
            handshake.enter(self._link, token.encode(), timeout)
        except handshake.RefusedError as error:
            raise InputError(f"hosts: the leader at {self._address} refused: {error}") from None
        except OSError as error:
            raise InputError(
                f"hosts: the leader does not listen at {self._address}: "
                f"{error.strerror or error}; see that the port is open, or name it by stream= in "
                "the leader's hosts"
            ) from None
        self._messages: queue.SimpleQueue[tuple[Any, bytes]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[int, Pending | PendingLogprobs]]
        self._outcomes = queue.SimpleQueue()
        self._link.send(encode(Greeting(self._job.index, process_name())))
        self._link.start(self._take, self._lose_leader)

    def agree(self, values: Mapping[str, Any]) -> None:
        """Sends the leader values, and waits until it has found those of all processes the same."""
        self._send(Facts({name: str(value) for name, value in values.items()}))
        self._expect(Go)

    def settings(self) -> LeaderSettings:
        """What the leader wants to be opened."""
        return self._expect(LeaderSettings)

    def fail(self, error: BaseException) -> None:
        """Tells the leader that this process cannot go on; ends with its message to all."""
        status = error.exit_status if isinstance(error, SsdError) else SsdError.exit_status
        self._give_up(error, status)

    def follow(self, make: Callable[[str, int], HostRoles], load: Callable[[Extra], None]) -> None:
        """Makes the leader's calls until it needs no more.

        Args:
          make: roles for a mode and K.
          load: loads the programs of an extra.
        """
        replay = Replay(make)
        threading.Thread(target=self._compare, daemon=True, name="outcomes").start()
        while True:
            message, frame = self._messages.get()
            if isinstance(message, End):
                compat.leave_job()
                return
            if isinstance(message, LoadExtra):
                load_extra = partial(self._load, load, message.extra)
                threading.Thread(target=load_extra, daemon=True, name="load").start()
            if isinstance(message, LoadExtra | Go):  # a `Go` ends the leader's wait for a load
                continue
            try:
                pending = replay.make(message, frame)
                if (message.role, message.method) == ("engine", "make"):
                    self.agree({"engine": message.engine})
            except Exception as error:
                self._give_up(error)
                return
            if pending is not None:
                self._outcomes.put((replay.calls.count, pending))

    def _load(self, load: Callable[[Extra], None], extra: Extra) -> None:
        try:
            load(extra)
            self._send(Facts({"loaded": extra}))
        except Exception as error:
            self._give_up(error)

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
            self._give_up(error)

    def _expect(self, kind: type[Any]) -> Any:
        message, _ = self._messages.get()
        if isinstance(message, End):
            self._leave("", 0)
        if not isinstance(message, kind):
            self._lose_leader(f"it has sent {type(message).__name__} in place of {kind.__name__}")
        return message

    def _take(self, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, Refuse):
            self._leave(message.why, message.status)
        if isinstance(message, End):
            self._ended = True
            self._link.close()  # so that the leader's closing counts as no loss
        self._messages.put((message, frame))

    def _lose_leader(self, why: str) -> None:
        self._leave(
            f"{host_name(0, self._job.count, f'the leader, {self._address}')} is lost: {why}",
            SsdError.exit_status,
        )

    def _give_up(self, error: BaseException, status: int = SsdError.exit_status) -> None:
        """Reports an error to the leader; ends with its message, or with the error if there is
        none."""
        why = describe_error(error)
        self._send(Refuse(why, status))
        time.sleep(_REPORT_WAIT)
        self._leave(f"{host_name(self._job.index, self._job.count, process_name())}: {why}", status)

    def _send(self, message: HostMessage) -> None:
        try:
            self._link.send(encode(message))
        except OSError as error:
            if not self._ended:  # the end may be the next message
                time.sleep(_REPORT_WAIT)
            if not self._ended:
                self._lose_leader(error.strerror or str(error))
