"""The process whose engine makes calls: it announces each call to followers before making it."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ssd_jax import compat
from ssd_jax.errors import DeviceError, InputError, SsdError
from ssd_jax.placement.hosts.comparing import ToldOutcomes, digest_of
from ssd_jax.placement.hosts.device_thread import DeviceThread
from ssd_jax.placement.hosts.facts import of_process
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.gathering import Gathering
from ssd_jax.placement.hosts.start import (
    STREAM,
    named,
    own_name,
    refusal,
    start,
    waited,
    words_of,
)
from ssd_jax.roles.records import Outcomes, TopLogprobs
from ssd_jax.sampling.params import Report
from ssd_jax.system.forks import only_in_owner
from ssd_jax.system.leaving import flush, leave
from ssd_jax.wire.address import Address
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.host_messages import (
    Call,
    End,
    Facts,
    Go,
    LeaderSettings,
    LoadReport,
    Refuse,
    Role,
    SeenOutcome,
    decode,
    encode,
)

T = TypeVar("T")
Read = TypeVar("Read", Outcomes, TopLogprobs)
_SILENT = 0.7  # of the time-out: how long a host may be silent; the rest is for telling of it
_TELLING = 0.1  # of the time-out: how long telling hosts why all end may take
_NAMED = 2.0  # seconds after a device error within which the host that caused it is found


class Leader:
    """The other processes of the job, as the leader knows them.

    Args:
      job: the job of all processes.
      hosts: the port to listen at, and how long to wait.
      timeout: seconds within which every process has ended after one is lost.
      leave: see `leaving.leave`.

    Raises:
      InputError: not all processes have come.
    """

    def __init__(
        self,
        job: compat.Job,
        hosts: Hosts,
        timeout: float,
        *,
        leave: Callable[[str, int], None] = leave,
    ) -> None:
        self._timeout, self._job, self._leave = timeout, job, leave
        self._facts: queue.SimpleQueue[tuple[int, Facts | None]] = queue.SimpleQueue()
        self._calling, self._changing = threading.RLock(), threading.Lock()
        self._agreeing = threading.Lock()  # taken before `_calling`
        self._digest, self._calls, self._engines = 0, 0, 0
        self._outcomes = ToldOutcomes(job.count)
        self._devices = DeviceThread()
        self._failure: SsdError | None = None
        self._failure_told = threading.Event()  # to all hosts that take it
        self._closed = self._decoding = False
        self._gathering = Gathering(job.count, _SILENT * timeout, self._begin)
        self._hosts = self._gathering.hosts
        self._at_exit = only_in_owner(self._end)
        atexit.register(self._at_exit)
        try:
            self._listen(hosts)
        except BaseException as error:
            self.fail(error)
            raise

    def agree(self, values: Mapping[str, Any]) -> None:
        """Waits until all processes have called this, with the same values.

        Raises:
          SsdError: values differ, or a process cannot go on or is lost; all end with this message.
        """
        values_of: dict[int, Mapping[str, str]] = {}
        while len(values_of) < len(self._hosts):
            index, message = self._facts.get()
            if self._failure is not None or message is None:
                self._facts.put((0, None))  # nobody waits again
                raise self._failure or SsdError("the model was closed meanwhile; open it again")
            values_of[index] = message.values
        own = {name: str(value) for name, value in values.items()}
        for index, theirs in sorted(values_of.items()):
            for name in own.keys() | theirs.keys():
                if own.get(name) != theirs.get(name):
                    error = InputError(
                        f"hosts differ in {name}: {self._name(0)} has {own.get(name)}, "
                        f"{self._name(index)} has {theirs.get(name)}; make them the same"
                    )
                    self.fail(error)
                    raise error
        self._send(encode(Go()))

    def settle(self, config: Mapping[str, Any], ks: Sequence[int]) -> None:
        """Tells the followers what to open."""
        self._send(encode(LeaderSettings(dict(config), list(ks))))

    def fail(self, error: BaseException) -> None:
        """Ends the other processes, since this one cannot go on."""
        status = error.exit_status if isinstance(error, SsdError) else SsdError.exit_status
        self._stop(refusal(words_of(error), status))

    def close(self) -> None:
        """Ends the other processes, which are no longer needed."""
        with self._changing:
            if self._closed or self._failure is not None:
                return
            self._closed = True
        self._facts.put((0, None))
        self._send(encode(End()))
        for host in self._hosts.values():
            host.link.close()
        compat.leave_job()

    def new_engine(self, mode: str, k: int, make: Callable[[], T]) -> tuple[int, T]:
        """Has all processes make an engine's roles, and waits; returns its number and its roles.

        If this process cannot make them, all end.
        """
        with self._agreeing, self._calling:
            number, self._engines = self._engines, self._engines + 1
            self._announce(number, "engine", "make", mode, k)
            try:
                roles = make()
            except BaseException as error:
                self.fail(error)
                raise
            self.agree({"engine": number})
        self._decoding = True
        return number, roles

    def load(self, report: Report, make: Callable[[], None]) -> None:
        """Has all processes load the programs of a report, and waits; calls go on meanwhile.

        If a process cannot load them, all end.
        """
        with self._agreeing:
            self._send(encode(LoadReport(report)))
            try:
                make()
            except BaseException as error:
                self.fail(error)
                raise
            self.agree({"loaded": report})

    def call(
        self, make: Callable[[], T], engine: int, role: Role, method: str, *arguments: Any
    ) -> tuple[int, T]:
        """Announces a call to the followers, see `host_messages.CALLS`, and makes it by `make`.
        Calls of several threads follow one another, in the same order on all hosts.

        Returns: the call's number and its result.

        Raises:
          DeviceError: a host or a program has failed.
        """
        with self._calling:
            return self._announce(engine, role, method, *arguments), self._made(make)

    def read(self, call: int, read: Callable[[], Read]) -> Read:
        """Waits for what a call gives; it is compared with those of the followers.

        Raises:
          DeviceError: a host or a program has failed.
        """
        found = self._made(read)
        self._compare(call, 0, digest_of(found))
        return found

    def _announce(self, engine: int, role: Role, method: str, *arguments: Any) -> int:
        if self._failure is not None:
            raise DeviceError(str(self._failure))
        frame = encode(Call(self._digest, engine, role, method, arguments))
        self._send(frame)
        self._digest = zlib.crc32(frame, self._digest)
        self._calls += 1
        return self._calls

    def _made(self, make: Callable[[], T]) -> T:
        """The result of `make`, which may hang for ever if a host is lost."""
        try:
            return self._devices.run(make)
        except DeviceError as error:
            raise self._named(error) from error

    def _named(self, error: DeviceError) -> DeviceError:
        """An error that names the lost host that caused it, if one is lost."""
        end = time.monotonic() + _NAMED
        while self._failure is None and time.monotonic() < end:
            time.sleep(_NAMED / 100)
        return error if self._failure is None else DeviceError(str(self._failure))

    def _listen(self, hosts: Hosts) -> None:
        """Waits for all followers; refuses connections without the secret."""
        address = Address.parse(self._job.address, "hosts")
        host = address.host if address.loopback else ""
        with self._gathering.listen(host, hosts.stream) as (port, secret):
            self._job.put(STREAM, f"{address.host} {port} {secret}")
            missing = self._gathering.wait(hosts.joining)
        if self._failure is not None:
            raise self._failure
        if missing:
            raise InputError(
                f"hosts: processes {missing} have not come to port {port} of {address.host}: see "
                f"that it is open, or name it by stream=; waited {waited(hosts)}"
            )

    def _begin(self, index: int, link: Frames) -> None:
        link.start(partial(self._take, index), partial(self._lose, index))

    def _take(self, index: int, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, SeenOutcome):
            self._compare(message.call, index, message.outcome)
        elif isinstance(message, Facts):
            self._facts.put((index, message))
        elif isinstance(message, Refuse):
            lost = " is lost" if self._decoding else ""
            self._stop(refusal(f"{self._name(index)}{lost}: {message.why}", message.status))
        else:
            raise OSError("it has sent what is not for the leader")

    def _compare(self, call: int, index: int, digest: int) -> None:
        if lost := self._outcomes.tell(call, index, digest):
            self._lose(*lost)

    def _lose(self, index: int, why: str) -> None:
        """Ends all processes: no program can run without this host."""
        self._stop(SsdError(f"{self._name(index)} is lost: {why}"))
        self._hosts[index].link.close()  # or a writer to it would wait

    def _stop(self, failure: SsdError) -> None:
        """Ends all processes with one message; this one at the latest when its patience ends."""
        with self._changing:
            if self._closed or self._failure is not None:
                return
            self._failure = failure
        self._gathering.end()
        self._devices.fail(DeviceError(str(failure)))
        self._facts.put((0, None))
        about = str(failure), failure.exit_status
        patience = threading.Timer((1 - _SILENT) * self._timeout, self._leave, about)
        patience.daemon = True
        patience.start()
        refuse = encode(Refuse(*about))
        telling = [
            threading.Thread(target=self._tell, args=(index, refuse), daemon=True)
            for index in list(self._hosts)
        ]
        for each in telling:
            each.start()
        for each in telling:
            each.join(_TELLING * self._timeout / len(telling))
        self._failure_told.set()

    def _name(self, index: int) -> str:
        name = self._hosts[index].name if index else own_name()
        return named(index, self._job.count, name)

    def _send(self, frame: bytes) -> None:
        for index in self._hosts:
            self._tell(index, frame)

    def _tell(self, index: int, frame: bytes) -> None:
        try:
            self._hosts[index].link.send(frame)
        except OSError as error:
            self._lose(index, error.strerror or str(error))

    def _end(self) -> None:
        """Ends a failed job at exit, since JAX would wait for processes that are gone."""
        self.close()
        if self._failure is not None:
            self._failure_told.wait(_TELLING * self._timeout)  # it may be told by another thread
            flush()  # `leave` cannot while Python ends; if no one reads, `_stop` ends the process
            self._leave("", self._failure.exit_status)


def lead(hosts: str, timeout: float) -> Leader:
    """Waits for all processes, and compares what must be the same on them.

    Args:
      hosts, timeout: see `Config.hosts` and `Config.host_timeout`.

    Raises:
      InputError: the job cannot start, or its processes differ.
    """
    about = Hosts.parse(hosts)
    leader = Leader(start(about, timeout, follows=False), about, timeout)
    leader.agree(of_process())
    return leader
