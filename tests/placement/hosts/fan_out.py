"""`python -m tests.placement.hosts.fan_out`: what it costs a leader to have a follower, in another
process, make the calls of its rounds; the roles of both do nothing."""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import resource
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from ssd_jax import compat
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.hosts.mirror import MirroredDrafter, MirroredTarget
from ssd_jax.roles.records import Drafted, draft_batch
from ssd_jax.sampling.proposal import Proposal
from tests.placement.hosts.paired import HOSTS, Pending, Scripted

SLOTS, K = 4, 4
WARM = 200
MODES = ("ar", "sd", "ssd")


class Quick(Scripted):
    """Notes when it is called, and makes nothing."""

    slots, k = SLOTS, K

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self._drafted = Drafted(np.full(SLOTS, K, np.int32), np.full((SLOTS, K), 7, np.int32))
        ids = np.full((SLOTS, K, 1), 7, np.int32)
        self._proposal = Proposal(
            self._drafted.tokens, self._drafted.lengths, ids, np.ones((SLOTS, K, 1), np.float32)
        )

    def note(self, name: str, *_call: Any) -> None:
        self.calls.append((name, time.perf_counter()))

    def pending(self) -> Pending:
        return Pending(7)

    def propose(self, batch: Any) -> Drafted:
        self.note("propose")
        return self._drafted

    def proposal(self) -> Proposal:
        return self._proposal


def follow(pipe: Any, mode: str) -> None:
    """The follower's process; sends when it was called, and its processor time."""
    text, roles = pipe.recv(), Quick()
    job = compat.Job("127.0.0.1:1", 1, 2, lambda *_: None, lambda *_: text)
    drafter = roles if mode == "sd" else None
    follower = Follower(job, HOSTS, 30.0)
    began = time.process_time()
    compat.leave_job = lambda: None
    follower.follow(lambda *_: SimpleNamespace(target=roles, drafter=drafter))
    pipe.send((roles.calls, time.process_time() - began))


def rounds(mode: str, count: int) -> tuple[list[float], ...]:
    """Per round: seconds of the leader's calls; the same of bare roles; seconds from a call of the
    leader's forward to the follower's; last of all the processor's seconds of both."""
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=follow, args=(other, mode))
    process.start()
    job = compat.Job("127.0.0.1:1", 0, 2, lambda _name, text: pipe.send(text), lambda *_: "")
    leader, role, here = Leader(job, HOSTS, 30.0), Quick(), Quick()
    atexit.unregister(leader._at_exit)
    leader_engine, _ = leader.new_engine(mode, K, lambda: None)
    drafter = MirroredDrafter(leader, leader_engine, role)
    target = MirroredTarget(leader, leader_engine, role, drafter.proposal if mode == "sd" else None)
    run(mode, target, drafter, WARM)
    before = resource.getrusage(resource.RUSAGE_SELF)
    spans, sent = run(mode, target, drafter, count)
    after = resource.getrusage(resource.RUSAGE_SELF)
    alone, _ = run(mode, here, here, count)
    compat.leave_job = lambda: None
    leader.close()
    calls, of_child = pipe.recv()
    process.join()
    came = [when for name, when in calls if name == "forward"][-count:]
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    delays = [there - here for here, there in zip(sent, came, strict=True)]
    return spans, alone, delays, [busy / count, of_child / (count + WARM)]


def run(mode: str, target: Any, drafter: Any, count: int) -> tuple[list[float], list[float]]:
    """Rounds with a pause between them, as long as a program's: who waits has fallen asleep."""
    lengths, spans, sent = np.arange(SLOTS, dtype=np.int32), [], []
    batch = draft_batch(SLOTS, K + 1)._replace(limit=np.full(SLOTS, K, np.int32))
    pending = np.full(SLOTS, 3, np.int32)
    for _ in range(count):
        time.sleep(0.005)
        drafted, proposal, began = None, None, time.perf_counter()
        if mode == "sd":
            drafted = drafter.propose(batch)
        elif mode == "ssd":
            drafted = Drafted(batch.limit, batch.tokens[:, :K])
        sent.append(time.perf_counter())
        logits = target.forward(pending, lengths, drafted)
        if mode != "ar":
            proposal = drafter.proposal()
        outcome = target.accept(logits, proposal)
        spans.append(time.perf_counter() - began)
        outcome.read()
    return spans, sent


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=1000)
    given = flags.parse_args()
    for mode in MODES:
        spans, alone, delays, (busy, of_child) = rounds(mode, given.rounds)
        added = f"{ms(spans, 50)} ms (p90 {ms(spans, 90)}; bare {ms(alone, 50)})"
        delay = f"{ms(delays, 50)} ms (p90 {ms(delays, 90)})"
        print(
            f"{mode}: a round's calls {added}; forward to the follower's {delay}; "
            f"processor a round: leader {1e3 * busy:.3f} ms, follower {1e3 * of_child:.3f} ms"
        )


def ms(seconds: list[float], percentile: int) -> str:
    return f"{1e3 * np.percentile(seconds, percentile):.3f}"


if __name__ == "__main__":
    main()
