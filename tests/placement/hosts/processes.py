"""Processes that run a target together on this machine: they stand for hosts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
DEVICES = 2
"""Virtual ones of each process."""


def free_port() -> int:
    """One that no connection takes meanwhile: systems give them ports from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment(**more: str) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if "device_count" not in flag]
    flags = " ".join([f"--xla_force_host_platform_device_count={DEVICES}", *others])
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    changed = {"XLA_FLAGS": flags, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **changed, **more}


class Processes:
    """A leader that runs a module with arguments, and followers; ended with the context.

    Args:
      leader: the module and its arguments, but for `--hosts`.
      count: processes, the leader among them.
      timeout: `--host_timeout` of all.
      follower: what followers run.
      folders: where each process is, by its index.
    """

    def __init__(
        self,
        *leader: str,
        count: int = 2,
        timeout: float = 60,
        follower: tuple[str, ...] = ("ssd_jax", "follower"),
        folders: dict[int, Path] | None = None,
    ) -> None:
        address = f"127.0.0.1:{free_port()},count={count}"
        self.processes = []
        for index in range(count):
            place = address if index == 0 else f"{address},index={index}"
            command = [*(leader if index == 0 else follower), f"--hosts={place}"]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command, f"--host_timeout={timeout}"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=(folders or {}).get(index, ROOT),
                    env=environment(),
                )
            )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_exception: object) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()

    def read_line(self) -> str:
        """The leader's next line of output."""
        return self.processes[0].stdout.readline()

    def ended(self, seconds: float = 240) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each process, when all have ended."""
        end, found = time.monotonic() + seconds, []
        for process in self.processes:
            output, errors = process.communicate(timeout=max(0.1, end - time.monotonic()))
            found.append((process.returncode, output, errors))
        return found


def results(processes: Processes) -> dict:
    """What `leading` has said, when all have ended well."""
    ends = processes.ended()
    assert [status for status, *_ in ends] == [0] * len(ends), "\n".join(e for *_, e in ends)
    return json.loads(ends[0][1])
