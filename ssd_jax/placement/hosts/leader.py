"""The process whose engine makes calls: it announces each call to followers before making it."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ssd_jax import compat
from ssd_jax.errors import DeviceError, InputError, SsdError
from ssd_jax.placement.hosts.comparing import OutcomeDigests, digest_of
from ssd_jax.placement.hosts.device_thread import DeviceThread
from ssd_jax.placement.hosts.facts import process_facts
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.gathering import Gathering
from ssd_jax.placement.hosts.job_state import CallLog, JobState
from ssd_jax.placement.hosts.start import (
    STREAM,
    describe_error,
    failure_error,
    host_name,
    process_name,
    start,
    wait_hint,
)
from ssd_jax.roles.records import Outcomes, TopLogprobs
from ssd_jax.sampling.params import Extra
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
    LoadExtra,
    Refuse,
    Role,
    SeenOutcome,
    decode,
    encode,
)

T = TypeVar("T")
Read = TypeVar("Read", Outcomes, TopLogprobs)
_SILENCE_SHARE = 0.7  # of the time-out: how long a host may be silent; the rest is for reporting it
_REPORT_SHARE = 0.1  # of the time-out: how long it may take to send hosts why all end
_CAUSE_WAIT = 2.0  # seconds after a device error within which the host that caused it is found


class Leader:
    """The other processes of the job, as the leader knows them.

    Args:
      job: the job of all processes.
      hosts: the port to listen at, and how long to wait.
      timeout: seconds within which every process has ended after one is lost.
      leave: ends this process, as `leaving.leave` does.

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
        self._state = JobState()
        self._facts: queue.SimpleQueue[tuple[int, Facts | None]] = queue.SimpleQueue()
        self._call_lock = threading.RLock()
        self._agree_lock = threading.Lock()  # taken before `_call_lock`
        self._calls, self._engine_count = CallLog(), 0
        self._outcomes = OutcomeDigests(job.count)
        self._devices = DeviceThread()
        self._has_engine = False
        self._gathering = Gathering(job.count, _SILENCE_SHARE * timeout, self._receive_from)
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
        while len(values_of) < len(self._gathering.hosts):
            index, message = self._facts.get()
            if self._state.failure is not None or message is None:
                self._facts.put((0, None))  # nobody waits again
                closed = SsdError("the model was closed meanwhile; open it again")
                raise self._state.failure or closed
            values_of[index] = message.values
        local = {name: str(value) for name, value in values.items()}
        for index, remote in sorted(values_of.items()):
            for name in local.keys() | remote.keys():
                if local.get(name) != remote.get(name):
                    error = InputError(
                        f"hosts differ in {name}: {self._name(0)} has {local.get(name)}, "
                        f"{self._name(index)} has {remote.get(name)}; make them the same"
                    )
                    self.fail(error)
                    raise error
        self._send(encode(Go()))

    def send_settings(self, config: Mapping[str, Any], ks: Sequence[int]) -> None:
        """Sends the followers what to open."""
        self._send(encode(LeaderSettings(dict(config), list(ks))))

    def fail(self, error: BaseException) -> None:
        """Ends the other processes, since this one cannot go on."""
        status = error.exit_status if isinstance(error, SsdError) else SsdError.exit_status
        self._stop(failure_error(describe_error(error), status))

    def close(self) -> None:
        """Ends the other processes, which are no longer needed."""
        if not self._state.close():
            return
        self._facts.put((0, None))
        self._send(encode(End()))
        for host in self._gathering.hosts.values():
            host.link.close()
        compat.leave_job()

    def new_engine(self, mode: str, k: int, make: Callable[[], T]) -> tuple[int, T]:
        """Has all processes make an engine's roles, and waits; returns its number and its roles.

        If this process cannot make them, all end.
        """
        with self._agree_lock, self._call_lock:
            number, self._engine_count = self._engine_count, self._engine_count + 1
            self._announce(number, "engine", "make", mode, k)
            roles = self._run_or_fail(make)
            self.agree({"engine": number})
        self._has_engine = True
        return number, roles

    def load(self, extra: Extra, make: Callable[[], None]) -> None:
        """Has all processes load the programs of an extra, and waits; calls go on meanwhile.

        If a process cannot load them, all end.
        """
        with self._agree_lock:
            self._send(encode(LoadExtra(extra)))
            self._run_or_fail(make)
            self.agree({"loaded": extra})

    def _run_or_fail(self, make: Callable[[], T]) -> T:
        """The result of `make`; if it raises an error, all processes end."""
        try:
            return make()
        except BaseException as error:
            self.fail(error)
            raise

    def call(
        self, make: Callable[[], T], engine: int, role: Role, method: str, *arguments: Any
    ) -> tuple[int, T]:
        """Announces a call of `host_messages.CALLS` to the followers, and makes it by `make`.

        Calls of several threads follow one another, in the same order on all hosts.

        Returns: the call's number and its result.

        Raises:
          DeviceError: a host or a program has failed.
        """
        with self._call_lock:
            return self._announce(engine, role, method, *arguments), self._run(make)

    def read(self, call: int, read: Callable[[], Read]) -> Read:
        """Waits for what a call gives; it is compared with those of the followers.

        Raises:
          DeviceError: a host or a program has failed.
        """
        outcomes = self._run(read)
        self._compare(call, 0, digest_of(outcomes))
        return outcomes

    def _announce(self, engine: int, role: Role, method: str, *arguments: Any) -> int:
        if self._state.failure is not None:
            raise DeviceError(str(self._state.failure))
        frame = encode(Call(self._calls.digest, engine, role, method, arguments))
        self._send(frame)
        self._calls.add(frame)
        return self._calls.count

    def _run(self, make: Callable[[], T]) -> T:
        """The result of `make`, which may hang for ever if a host is lost."""
        try:
            return self._devices.run(make)
        except DeviceError as error:
            raise self._with_cause(error) from error

    def _with_cause(self, error: DeviceError) -> DeviceError:
        """An error that names the lost host that caused it, if one is lost."""
        end = time.monotonic() + _CAUSE_WAIT
        while self._state.failure is None and time.monotonic() < end:
            time.sleep(_CAUSE_WAIT / 100)
        failure = self._state.failure
        return error if failure is None else DeviceError(str(failure))

    def _listen(self, hosts: Hosts) -> None:
        """Waits for all followers; refuses connections without the secret."""
        address = Address.parse(self._job.address, "hosts")
        host = address.host if address.loopback else ""
        with self._gathering.listen(host, hosts.stream) as (port, secret):
            self._job.put(STREAM, f"{address.host} {port} {secret}")
            missing = self._gathering.wait(hosts.joining)
        if self._state.failure is not None:
            raise self._state.failure
        if missing:
            raise InputError(
                f"hosts: processes {missing} have not come to port {port} of {address.host}: see "
                f"that it is open, or name it by stream=; waited {wait_hint(hosts)}"
            )

    def _receive_from(self, index: int, link: Frames) -> None:
        link.start(partial(self._take, index), partial(self._lose_host, index))

    def _take(self, index: int, frame: bytes) -> None:
        message = decode(frame)
        if isinstance(message, SeenOutcome):
            self._compare(message.call, index, message.outcome)
        elif isinstance(message, Facts):
            self._facts.put((index, message))
        elif isinstance(message, Refuse):
            lost = " is lost" if self._has_engine else ""
            self._stop(failure_error(f"{self._name(index)}{lost}: {message.why}", message.status))
        else:
            raise OSError("it has sent what is not for the leader")

    def _compare(self, call: int, index: int, digest: int) -> None:
        if lost := self._outcomes.report(call, index, digest):
            self._lose_host(*lost)

    def _lose_host(self, index: int, why: str) -> None:
        """Ends all processes: no program can run without this host."""
        self._stop(SsdError(f"{self._name(index)} is lost: {why}"))
        self._gathering.hosts[index].link.close()  # or a writer to it would wait

    def _stop(self, failure: SsdError) -> None:
        """Ends all processes with one message; this one at the latest when its patience ends."""
        if not self._state.fail(failure):
            return
        self._gathering.end()
        self._devices.fail(DeviceError(str(failure)))
        self._facts.put((0, None))
        reason = str(failure), failure.exit_status
        patience = threading.Timer((1 - _SILENCE_SHARE) * self._timeout, self._leave, reason)
        patience.daemon = True
        patience.start()
        refuse = encode(Refuse(*reason))
        threads = [
            threading.Thread(target=self._send_to, args=(index, refuse), daemon=True)
            for index in list(self._gathering.hosts)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_REPORT_SHARE * self._timeout / len(threads))
        self._state.reported.set()

    def _name(self, index: int) -> str:
        name = self._gathering.hosts[index].name if index else process_name()
        return host_name(index, self._job.count, name)

    def _send(self, frame: bytes) -> None:
        for index in self._gathering.hosts:
            self._send_to(index, frame)

    def _send_to(self, index: int, frame: bytes) -> None:
        try:
            self._gathering.hosts[index].link.send(frame)
        except OSError as error:
            self._lose_host(index, error.strerror or str(error))

    def _end(self) -> None:
        """Ends a failed job at exit, since JAX would wait for processes that are gone."""
        self.close()
        if self._state.failure is not None:
            self._state.reported.wait(_REPORT_SHARE * self._timeout)  # by another thread
            flush()  # `leave` cannot while Python ends; if no one reads, `_stop` ends the process
            self._leave("", self._state.failure.exit_status)


def lead(setting: str, timeout: float) -> Leader:
    """Waits for all processes, and compares what must be the same on them.

    Args:
      setting, timeout: as `Config.hosts` and `Config.host_timeout`.

    Raises:
      InputError: the job cannot start, or its processes differ.
    """
    hosts = Hosts.parse(setting)
    leader = Leader(start(hosts, timeout, follows=False), hosts, timeout)
    leader.agree(process_facts())
    return leader
