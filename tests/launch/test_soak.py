"""Minutes of random faults: every text is right, SSD comes back, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from ssd_jax import SamplingParams
from tests.launch.checkout import children, gone
from tests.llm.paged import opened as opened_here
from tests.placement.remote.proxy import Proxy
from tests.placement.remote.workers import checkpoints, opened, start
from tests.waiting import eventually

pytestmark = pytest.mark.slow
SECONDS = 300
CLIENTS = 3
MEGABYTES = 300
"""That this process may grow by, once it has been through every fault."""
ASKED = [
    {"max_tokens": 40},
    {"max_tokens": 90, "frequency_penalty": 0.3},
    {"max_tokens": 60, "temperature": 0.8, "seed": 4},
    {"max_tokens": 25, "temperature": 0.5, "top_p": 0.9, "seed": 5},
    {"max_tokens": 3},
    {"max_tokens": 70, "logit_bias": {65: 2.0}},
]


class Soak:
    """Clients of two models, and what goes wrong with their drafts."""

    def __init__(self, root, link, near, far) -> None:
        self.root, self.link, self.near, self.far = root, link, near, far
        self.models = [near, far]
        self.chance = random.Random(7)
        self.until = time.monotonic() + SECONDS
        self.seen: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.worker = None  # behind the link

    def expect(self) -> None:
        """What every request says by itself."""
        every = range(len(ASKED))
        self.expected = [output_of(self.run(self.near, n, "ar")).token_ids for n in every]

    def run(self, model, number, mode="ssd"):
        params = SamplingParams(ignore_eos=True, **ASKED[number])
        return model.run([model.request(f"soak {number}", params, number)], mode)

    def client(self, number: int) -> None:
        """Asks, compares, and leaves some texts before their end."""
        chance = random.Random(number)
        with self.noted():
            while time.monotonic() < self.until:
                asked, leaves = chance.randrange(len(ASKED)), chance.random() < 0.2
                events = self.run(chance.choice(self.models), asked)
                for event in events:
                    if event.output is not None:
                        assert event.output.token_ids == self.expected[asked]
                        self.seen["texts"] += 1
                        self.seen["hits"] += bool(event.output.metrics["hit_rate"])
                        self.seen.update(event.output.metrics["miss_causes"] or {})
                    elif leaves and chance.random() < 0.05:
                        events.close()
                        self.seen["left"] += 1
                        break

    def trouble(self) -> None:
        """Brings faults about, one after the other."""
        faults = (
            self.kill_near,
            self.stop_near,
            self.kill_far,
            self.part,
            self.reset,
            self.slow,
            self.damage,
            self.strangers,
        )
        with self.noted():
            while time.monotonic() < self.until:
                fault = self.chance.choice(faults)
                self.seen[fault.__name__] += 1
                fault()
                time.sleep(self.chance.uniform(0.5, 4))

    @contextlib.contextmanager
    def noted(self):
        try:
            yield
        except BaseException as error:
            self.failures.append(error)
            self.until = 0.0
            raise

    def pid(self):
        """Of one of the near model's workers, if it is ready."""
        return self.chance.choice(self.near.loaded.worker.workers).supervisor.pid

    def kill_near(self) -> None:
        if pid := self.pid():
            os.kill(pid, signal.SIGKILL)

    def stop_near(self) -> None:
        if pid := self.pid():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self.chance.uniform(0.2, 3))
            with contextlib.suppress(ProcessLookupError):  # it was taken to hang, and ended
                os.kill(pid, signal.SIGCONT)

    def kill_far(self) -> None:
        self.worker.process.kill()
        self.worker.process.communicate()
        self.worker = start(self.root, listen=self.worker.address)

    def part(self) -> None:
        with self.link.parted():
            time.sleep(self.chance.uniform(0.2, 4))

    def reset(self) -> None:
        self.link.cut()

    def slow(self) -> None:
        self.link.delay = 0.03
        time.sleep(3)
        self.link.delay = 0.0

    def damage(self) -> None:
        self.link.damage = 0.05
        time.sleep(2)
        self.link.damage = 0.0

    def strangers(self) -> None:
        for _ in range(20):
            with contextlib.suppress(OSError), socket.socket() as stranger:
                stranger.settimeout(1)
                stranger.connect(("127.0.0.1", int(self.worker.port)))
                stranger.sendall(self.chance.randbytes(self.chance.randrange(300)))


def test_random_faults_for_minutes_lose_nothing_and_leave_nothing(tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    root, before = checkpoints(tmp_path), set(children(os.getpid()))
    pair = [str(root / "target"), str(root / "draft")]
    worker = start(root, "--engines=2")
    with contextlib.ExitStack() as ends:
        link = Proxy(int(worker.port))
        ends.callback(link.close)
        shared = {"draft_placement": "process", "draft_workers": 2, "draft_split": "branches"}
        near = ends.enter_context(opened_here(pair, slots=4, **shared))
        far = ends.enter_context(opened(root, f"127.0.0.1:{link.port}"))
        for draft_worker in (*near.loaded.worker.workers, far.loaded.worker):
            draft_worker.patience = 1.0  # as users have it
        soak = Soak(root, link, near, far)
        soak.worker = worker
        soak.expect()
        threads = [threading.Thread(target=soak.client, args=(n,)) for n in range(CLIENTS)]
        threads.append(threading.Thread(target=soak.trouble))
        for thread in threads:
            thread.start()
        time.sleep(SECONDS / 3)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for thread in threads:
            thread.join(SECONDS + 120)
            assert not thread.is_alive(), "a client hangs"
        assert not soak.failures, soak.failures
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) / 1024
        print(f"{dict(soak.seen)}, {grown:.0f} MB more")
        assert grown < MEGABYTES
        assert soak.seen["texts"] > SECONDS / 10
        assert soak.seen["hits"] > SECONDS / 30
        for model in (near, far):
            eventually(lambda model=model: hits(soak, model))
        sockets = _sockets()
    soak.worker.process.terminate()
    assert soak.worker.process.wait(30) == 0
    gone({*children(os.getpid())} - before)
    assert _sockets() < sockets
    assert list(temporary.iterdir()) == []


def hits(soak, model):
    found = output_of(soak.run(model, 1))
    assert found.token_ids == soak.expected[1]
    return found.metrics["hit_rate"]


def output_of(events):
    (found,) = [event.output for event in events if event.output is not None]
    return found


def _sockets() -> int:
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this look itself
            count += str(path.readlink()).startswith("socket:")
    return count
