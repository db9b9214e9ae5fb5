"""How a process joins the others, and how it leaves them."""

from __future__ import annotations

import os
import socket
import threading
import time

from ssd_jax import compat
from ssd_jax.errors import InputError, SsdError
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.system.leaving import leave
from ssd_jax.wire import sockets
from ssd_jax.wire.address import Address
from ssd_jax.wire.sockets import Endpoint

STREAM = "ssd_jax/stream"
"""Key of the text with the leader's address and the secret of the job."""
_PAUSE = 0.2


def host_name(index: int, count: int, name: str) -> str:
    """How messages name a process of a job."""
    return f"host {index} of {count} ({name})"


def process_name() -> str:
    """Name of this process: where it runs, and its process id."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def describe_error(error: BaseException) -> str:
    """The text about an error that other processes get."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return str(error) or type(error).__name__


def failure_error(reason: str, status: int) -> SsdError:
    """The error for a message that all hosts end with."""
    return InputError(reason) if status == InputError.exit_status else SsdError(reason)


def listen(host: str, port: int, remedy: str) -> Endpoint:
    """Listens at an address of this machine, as `sockets.listen`.

    Raises:
      InputError: the port cannot be had; the message ends with the remedy.
    """
    try:
        return sockets.listen(host, port)
    except OSError as error:
        # Its words also have the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InputError(f"hosts: port {port} cannot be listened at: {reason}; {remedy}") from None


def start(hosts: Hosts, timeout: float, *, follows: bool) -> compat.Job:
    """Joins the job; every process must call it, and waits for the others.

    Args:
      timeout: seconds within which every process has ended after one is lost.
      follows: whether this process is a follower.

    Raises:
      InputError: the job cannot be joined, or this process has another place in it.
    """
    if hosts.address is None:
        job_text = " that JAX was to find out (of SLURM, Kubernetes or a TPU's metadata)"
    else:
        job_text = f" with its coordinator at {hosts.address}"
        _check_place(hosts.index, follows)
        if follows:
            _wait_for_leader(hosts)
        else:  # JAX would end this process
            _, port = Address.parse(hosts.address, "hosts")
            listen("", port, "give another port to all processes").socket.close()
    # Without this timer, JAX would abort the process.
    timeout_text = (
        f"hosts: not all processes have come to the job{job_text} within {wait_hint(hosts)}"
    )
    limit = threading.Timer(hosts.joining, leave, (timeout_text, InputError.exit_status))
    limit.daemon = True
    limit.start()
    try:
        job = compat.start_job(2 * hosts.joining, timeout, **hosts.jax_arguments)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        remedy = "" if hosts.jax_arguments else "; give hosts = ADDRESS:PORT,count=N"
        raise InputError(f"hosts: the job{job_text} cannot start: {reason}{remedy}") from None
    finally:
        limit.cancel()
    _check_place(job.index, follows)
    return job


def _check_place(index: int, follows: bool) -> None:
    """Refuses a follower in the place of the leader, and a leader elsewhere."""
    if follows and index == 0:
        raise InputError(
            "hosts: this is process 0 of the job, the leader, whose command is any other; a "
            "follower has an index from 1 on"
        )
    if not follows and index > 0:
        raise InputError(
            f"hosts: this is process {index} of the job, and the leader is process 0; run "
            "ssd-jax follower here"
        )


def wait_hint(hosts: Hosts) -> str:
    """How long a process waits for the others, and how to make it wait longer."""
    return f"{hosts.joining} s; hosts=...,joining=SECONDS waits longer"


def _wait_for_leader(hosts: Hosts) -> None:
    """Waits until the leader listens."""
    address = Address.parse(hosts.address or "", "hosts")
    end, reason = time.monotonic() + hosts.joining, ""
    while time.monotonic() < end:
        try:
            socket.create_connection(address, timeout=_PAUSE * 10).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
        time.sleep(_PAUSE)
    raise InputError(
        f"hosts: nobody listens at {address} ({reason}): start the leader there, and see that the "
        f"port is open, as nc -vz {address.host} {address.port} tells; waited {wait_hint(hosts)}"
    )
