"""`python -m tests.server.soak --minutes=30`: a server under mixed load, with a fault every 30 s.

Clients compare every text with what the target says alone; others leave, read late or send
nonsense; the draft's worker is killed or stopped. Each fault prints a line. It ends with status 1
at a wrong text, or where requests, pages, threads, files or memory are left behind. Without
--target and --draft it writes a tiny pair.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.checkpoints import tiny_pair
from tests.llm.paged import SHAPE
from tests.server import http_calls, load
from tests.server.http_calls import call, raw
from tests.waiting import eventually

SECONDS = 30  # between faults
GRAMMATICAL = [
    {
        "prompt": "Once upon a time",
        "structured_outputs": {"regex": "([a-z]{3,9} ){10,30}!"},
        "ignore_eos": False,
        "seed": 4,
        "max_tokens": 120,
        "priority": priority,
    }
    for priority in (-1, 1)
]
"""Texts under a grammar, before and behind the others in the queue."""
MEGABYTES = 50
"""That the process may grow by in the last two thirds; in the first one it grows in steps, by some
250, at the first requests of each kind at once."""


def kill(server, chance):
    """Kills the draft's worker, if it is ready."""
    del chance
    if pid := server.llm.loaded.worker.supervisor.pid:
        os.kill(pid, signal.SIGKILL)


def stop(server, chance):
    """Stops the draft's worker for some seconds."""
    if pid := server.llm.loaded.worker.supervisor.pid:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(chance.uniform(0.2, 3))
        with contextlib.suppress(ProcessLookupError):  # it was taken to hang, and ended
            os.kill(pid, signal.SIGCONT)


def leave(server, chance):
    """Hundred clients leave at random moments."""
    threads = [
        threading.Thread(target=load.leaves_many_times, args=(server.port, chance.random(), 10))
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_late(server, chance):
    """Clients ask for long texts and take nothing for some seconds."""
    with contextlib.ExitStack() as readers:
        for number in range(4):
            asked = load.body(number, max_tokens=300, logprobs=20, stream=True)
            readers.enter_context(load.late_reader(server.port, asked))
        time.sleep(chance.uniform(1, 5))


def send_nonsense(server, chance):
    """Bodies that are large, deep, or no JSON; and bytes that are no HTTP."""
    for data in (bytes(10_000_000), b"[" * 100_000, chance.randbytes(1000)):
        status, *_ = call(server.port, "POST", "/v1/completions", data)
        assert 400 <= status < 500, status
    for _ in range(20):
        with raw(server.port, chance.randbytes(chance.randrange(1, 300))):
            pass


FAULTS = (kill, stop, leave, read_late, send_nonsense)


def memory() -> int:
    """Megabytes of this process's memory, that in swap included, without that of mapped files,
    which the system takes and gives back as it likes."""
    fields = dict(
        re.findall(r"(RssAnon|VmSwap):\s+(\d+) kB", Path("/proc/self/status").read_text())
    )
    return sum(map(int, fields.values())) >> 10


def soak(server, minutes: float, seed: int) -> bool:
    """Whether nothing grew; raises what a client saw."""
    expected = [load.answer_alone(server, fields) for fields in load.ASKED]
    chance, clients = random.Random(seed), load.Neighbours(server, expected)
    end, used = time.monotonic() + 60 * minutes, []
    with clients.beside(count=4):
        for turn in range(10**9):
            fault = FAULTS[turn] if turn < len(FAULTS) else chance.choice(FAULTS)
            fault(server, chance)
            time.sleep(min(SECONDS, 60 * minutes / 10))
            used.append((memory(), load.open_files(), load.threads_of_requests()))
            megabytes, files, threads = used[-1]
            print(
                f"{fault.__name__}: {clients.texts} texts, {megabytes} MB, {files} files, "
                f"{threads} threads",
                flush=True,
            )
            if clients.failures or (time.monotonic() > end and len(used) > len(FAULTS)):
                break
    eventually(lambda: load.nothing_is_left(server), seconds=60)
    eventually(lambda: server.llm.loaded.worker.supervisor.pid is not None)
    early = used[max(len(FAULTS), len(used) // 3) - 1]
    grown = [last - first for first, last in zip(early, used[-1], strict=True)]
    print(f"in the last two thirds: {grown[0]} MB, {grown[1]} files, {grown[2]} threads more")
    return grown[0] <= MEGABYTES and grown[1] <= 10 and grown[2] <= 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pair = [options.target, options.draft]
        if not all(pair):
            pair = tiny_pair.write(Path(directory), "qwen3", **SHAPE)
        http_calls.SECONDS = 600  # where other programs have the processor
        load.ASKED.extend(GRAMMATICAL)
        with load.opened(pair, compile_cache="off", queue=500) as server:
            return 0 if soak(server, options.minutes, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
