"""Mutated files of every kind that we read are read or refused: no traceback, no hang, no flood.

One case again: `python -m tests.fuzz.test_fuzz_files KIND SEED`.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.fuzz import clean

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures memory by /proc")

MOST_SECONDS, MOST_MEGABYTES = 5.0, 256
_KILL_SECONDS = 120.0
ROOT = Path(__file__).parents[2]


class Worker:
    """Runs cases in a process that may die of one; see `worker`."""

    def __init__(self, clean_files: Path, directory: Path) -> None:
        self._arguments = [str(clean_files), str(directory)]
        self._process: subprocess.Popen[str] | None = None

    def run(self, kind: str, seed: int) -> dict:
        """The worker's account of a case; a worker that died or hung is replaced for the next."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
            )
            assert self._answer(120.0) == "ready"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([kind, seed]) + "\n")
        self._process.stdin.flush()
        case = self._answer(_KILL_SECONDS)
        if case is None:
            status = self._process.wait()
            self.close()
            case = {"kind": kind, "seed": seed, "outcome": f"died ({status})", "words": ""}
        return case

    def _answer(self, seconds: float):
        assert self._process is not None
        assert self._process.stdout is not None
        limit = threading.Timer(seconds, self._process.kill)
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def faults(case: dict) -> str | None:
    """What is wrong with how a file was read, in words."""
    if case["outcome"] not in ("read", "refused"):
        return case["outcome"]
    # On a machine that is busy with other things the clock on the wall says little by itself: what
    # hangs either works or waits.
    if case["wall"] > MOST_SECONDS and case["cpu"] > MOST_SECONDS:
        return "hang"
    if case["wall"] > 4 * MOST_SECONDS and case["cpu"] < 1:
        return "hang"
    if case["megabytes"] > MOST_MEGABYTES:
        return "memory"
    if case["outcome"] == "refused" and not 10 < len(case["words"]) < 10_000:
        return "message"
    return None


def run(cases: Iterable[tuple[str, int]], directory: Path, workers: int = 1) -> list[dict]:
    """Every case's account, with its fault, if any."""
    clean.build(directory / "clean")
    queue, lock, done = iter(list(cases)), threading.Lock(), []

    def drive(number: int) -> None:
        worker = Worker(directory / "clean", directory / f"own-{number}")
        try:
            for kind, seed in _taken(queue, lock):
                case = worker.run(kind, seed)
                done.append(case | {"fault": faults(case)})
        finally:
            worker.close()

    threads = [threading.Thread(target=drive, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return done


def _taken(queue: Iterator, lock: threading.Lock) -> Iterator[tuple[str, int]]:
    while True:
        with lock:
            item = next(queue, None)
        if item is None:
            return
        yield item


def _summary(done: list[dict]) -> str:
    counts = collections.Counter(case["fault"] or case["outcome"] for case in done)
    bad = [case for case in done if case["fault"]]
    listed = "\n".join(f"{json.dumps(case)[:2500]}" for case in bad[:20])
    return f"{dict(counts)}\n{listed}"


def _cases(count: int, first: int) -> list[tuple[str, int]]:
    return [
        (clean.KINDS[n % len(clean.KINDS)], first + n // len(clean.KINDS)) for n in range(count)
    ]


@pytest.mark.more
@pytest.mark.parametrize("workers", [1])
def test_mutated_files_are_read_or_refused(tmp_path, workers):
    done = run(_cases(195, first=0), tmp_path, workers)
    assert len(done) == 195
    assert not [case for case in done if case["fault"]], _summary(done)
    assert sum(case["outcome"] == "refused" for case in done) > 60  # mutations do something
    assert sum(case["outcome"] == "read" for case in done) > 20


@pytest.mark.slow
def test_5000_mutated_files_are_read_or_refused(tmp_path):
    done = run(_cases(5000, first=1000), tmp_path, workers=2)
    print(_summary(done))
    assert len(done) == 5000
    assert not [case for case in done if case["fault"]], _summary(done)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(run([(sys.argv[1], int(sys.argv[2]))], Path(scratch))[0], indent=1))
