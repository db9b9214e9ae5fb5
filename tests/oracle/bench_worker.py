"""An engine of `bench_engines.py` in a process of its own, and one undisturbed run of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from bench_engines import Engine

WORKER_SCRIPT = Path(__file__).with_name("bench_rivals.py")
FORWARDED = ("model", "draft", "k", "prompts", "max_tokens", "dtype", "cores")
MOST_FOREIGN_CPU = 0.1  # cores; torch's spinning threads collapse when anything shares theirs


class Worker:
    """An engine in another process, loaded and warm, that runs only when told to.

    Between runs it is blocked reading its standard input. Start one after the other: loading
    and warm-up are over when the constructor returns.

    Raises:
      RuntimeError: the process ended instead of answering (its error is on standard error).
    """

    def __init__(self, python: str, engine: str, args: argparse.Namespace) -> None:
        self.engine = engine
        command = [python, str(WORKER_SCRIPT), "--worker", "--engine", engine]
        for name in FORWARDED:
            if getattr(args, name) is None:
                continue
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()

    def generate(self, index: int) -> dict[str, Any]:
        """The `Measurement` of one prompt, as a dictionary."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """User and system time of the process so far (Linux only)."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.engine} worker ended (status {self._process.wait()})")
        return json.loads(line)


def serve(engine: Engine, about: dict[str, Any], out: TextIO) -> None:
    """The worker's side: answers prompt indices on standard input until that closes."""
    print(json.dumps(about), file=out, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        measurement = engine.generate(int(line))
        seconds = time.perf_counter() - start
        decoding = (len(measurement.token_ids) - 1) / measurement.tokens_per_second
        run = dataclasses.asdict(measurement) | {
            "first_token_seconds": seconds - decoding,
            "decode_seconds": decoding,
        }
        print(json.dumps(run), file=out, flush=True)


def undisturbed_run(
    worker: Worker, idle: Sequence[Worker], index: int, tries: int
) -> dict[str, Any]:
    """One prompt on `worker`, run again while other processes used the machine meanwhile.

    A run is discarded for what others did, never for its own speed. After `tries` the last one
    stands.

    Returns:
      The measurement with `first_token_seconds` (all but the decoding: the prefill above all),
      `decode_seconds`, `idle_cpu` and `foreign_cpu`, the cores used by the idle engines and by
      everything else on the machine or its host while it ran, and `discarded`, the runs thrown
      away before it.
    """
    discarded = 0
    while True:
        before = _clocks(worker, idle)
        run = worker.generate(index)
        wall, machine, work, idling = (
            after - start for after, start in zip(_clocks(worker, idle), before, strict=True)
        )
        run |= {
            "idle_cpu": idling / wall,
            "foreign_cpu": max(0.0, machine - work - idling) / wall,
            "discarded": discarded,
        }
        if run["foreign_cpu"] <= MOST_FOREIGN_CPU or discarded == tries - 1:
            return run
        discarded += 1


def _clocks(worker: Worker, idle: Sequence[Worker]) -> tuple[float, float, float, float]:
    """Seconds: wall, CPU of the whole machine, of the worker, of the idle ones."""
    return (
        time.perf_counter(),
        _machine_cpu_seconds(),
        worker.cpu_seconds(),
        sum(other.cpu_seconds() for other in idle),
    )


def _machine_cpu_seconds() -> float:
    """Time all cores were busy, or taken by the host of a virtual machine (Linux only)."""
    first, *_ = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
