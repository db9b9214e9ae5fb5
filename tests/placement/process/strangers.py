"""What strangers on a worker's socket cost it, and its engine.

    python -m tests.placement.process.strangers [--streams=2500]

Strangers of the same user (no other can reach the socket) come in thousands: connections that say
nothing, proofs of a token that is another, the length of a message without end, and noise. For each
kind: seconds of a core and growth of memory of an otherwise idle worker; then what happens to an
engine that decodes while they come.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ssd_jax.placement.process.placement import DraftWorker
from ssd_jax.wire import handshake
from ssd_jax.wire.frames import with_length
from tests.placement.process.fake_worker import command
from tests.placement.process.script import SETTINGS
from tests.placement.process.scripted import only_misses, run_of

KINDS = ("quiet", "guess", "huge", "noise")


class Cost(NamedTuple):
    """Of all strangers of a kind.

    Attributes:
      core: seconds.
      memory: bytes, at most.
      text: median milliseconds of a text of the engine while they came, after those without.
      lost: what its draft counted meanwhile that no draft in good health does.
    """

    core: float
    memory: int
    text: tuple[float, float]
    lost: dict[str, int]


def attack(address: str, kind: str, streams: int) -> None:
    """Comes as that many strangers, and leaves."""
    message = {
        "quiet": b"",
        "guess": with_length(handshake.hello() + bytes(32)),
        "huge": (2**32 - 1).to_bytes(4, "little"),
        "noise": os.urandom(1000),
    }[kind]
    _connections(address.removeprefix("unix:"), streams, message)


class _whatever_comes:  # noqa: N801
    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        return kind is not None and issubclass(kind, OSError)


def _connections(path: str, count: int, message: bytes) -> None:
    opened = []
    for _ in range(count):
        found = socket.socket(socket.AF_UNIX)
        found.settimeout(1.0)
        with _whatever_comes():
            found.connect(path)
            found.sendall(message)
        opened.append(found)
        if message or len(opened) == 500:  # our own files have an end, too
            time.sleep(0.0 if message else 0.2)
            for opening in opened:
                opening.close()
            opened.clear()


def cost(kind: str, streams: int) -> Cost:
    """Measures strangers of a kind, on a worker with one engine."""
    worker = DraftWorker(SETTINGS, patience=30.0, command=command())
    try:
        worker.supervisor.start()
        worker.supervisor.wait_ready()
        run = run_of(worker.draft())
        pid, address = worker.supervisor.pid, worker.supervisor.address
        assert pid is not None
        assert address is not None

        def text() -> float:
            began = time.perf_counter()
            causes = run.generate(count=1)
            assert only_misses(causes), causes
            return 1e3 * (time.perf_counter() - began)

        alone = statistics.median(text() for _ in range(50))
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the most memory is what it is now
        core, memory = core_seconds(pid), _memory(pid)
        with _strangers(address, kind, streams) as process:
            process.wait()
        time.sleep(1.0)
        core, memory = core_seconds(pid) - core, _memory(pid) - memory
        texts = []
        with _strangers(address, kind, streams) as process:
            while process.poll() is None:
                texts.append(text())
        usual = {"connections": 1, "overtaken": run.draft.counters["overtaken"]}
        lost = run.draft.counters - Counter(usual)
        return Cost(core, memory, (alone, statistics.median(texts)), dict(lost))
    finally:
        worker.close()


def _strangers(address: str, kind: str, streams: int) -> subprocess.Popen[bytes]:
    code = "import sys; from tests.placement.process.strangers import attack;"
    code += f"attack({address!r}, {kind!r}, {streams})"
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


def core_seconds(pid: int) -> float:
    """Seconds of a core that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> int:
    """The most bytes in memory since its mark was set back."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=2500)
    parser.add_argument("--kinds", default=",".join(KINDS))
    flags = parser.parse_args()
    for kind in flags.kinds.split(","):
        core, memory, (alone, beside), lost = cost(kind, flags.streams)
        print(
            f"{kind}: {core:.2f} s of a core, {memory / 2**20:.1f} MiB; texts of {beside:.0f} ms, "
            f"{alone:.0f} without; lost: {lost or 'nothing'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
