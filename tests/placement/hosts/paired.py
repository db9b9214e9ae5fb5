"""A leader and a follower in one process, with scripted roles."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from ssd_jax import compat
from ssd_jax.placement.hosts import follower
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.hosts.mirror import MirroredDrafter, MirroredTarget
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import Drafted, Outcomes, ProposedTokens, TopLogprobs
from ssd_jax.sampling.proposal import Proposal

HOSTS = Hosts("127.0.0.1:1", 2, joining=60)
SILENCE = 10.0
SLOTS, K = 2, 3


class Texts:
    """Of a job."""

    def __init__(self) -> None:
        self._known: dict[str, queue.SimpleQueue[str]] = {}

    def of(self, name: str) -> queue.SimpleQueue[str]:
        return self._known.setdefault(name, queue.SimpleQueue())

    def job(self, index: int, count: int = 2) -> compat.Job:
        def put(name: str, text: str) -> None:
            for _ in range(count):
                self.of(name).put(text)

        def get(name: str, seconds: float) -> str:
            return self.of(name).get(timeout=seconds)

        return compat.Job("127.0.0.1:1", index, count, put, get)


@dataclasses.dataclass
class Pending:
    """Outcomes that tell what was called before."""

    value: int

    @property
    def bonus(self) -> np.ndarray:
        return np.full(SLOTS, self.value, np.int32)

    def ready(self) -> bool:
        return True

    def read(self) -> Outcomes:
        return Outcomes(np.zeros(SLOTS, np.int32), np.full((SLOTS, 1), self.value, np.int32))


@dataclasses.dataclass
class Scored:
    """Log-probabilities that tell what was called before."""

    value: int
    count: int

    def read(self) -> TopLogprobs:
        ids = np.full((1, self.count, 2), self.value, np.int32)
        return TopLogprobs(ids[..., 0] / np.float32(2), ids, ids / np.float32(2))


class Scripted(Drafter):
    """Both roles: notes each call; outcomes depend on all calls so far."""

    slots, context, max_chunk, k = SLOTS, 64, 8, K
    on_device = timed = True

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def note(self, *call: Any) -> None:
        self.calls.append(plain(call))

    def open(self, opening: Any) -> None:
        self.note("open", opening)

    def set_pages(self, slot: int, pages: Any) -> None:
        self.note("set_pages", slot, list(pages))

    def prefill(self, slot: int, tokens: Any, offset: int, *, last: bool = False) -> None:
        self.note("prefill", slot, list(tokens), offset, last)

    def prefill_last(self, slot: int, tokens: Any, offset: int, masks: Any = None) -> Pending:
        self.note("prefill_last", slot, list(tokens), offset, masks)
        return self.pending()

    def score(self, slot: int, tokens: Any) -> Scored:
        self.note("score", slot, list(tokens))
        return Scored(hash(repr(self.calls)) % 2**31, len(tokens))

    def forward(self, pending: Any, lengths: Any, drafted: Drafted | None = None) -> str:
        self.note("forward", pending, lengths, drafted and (drafted.lengths, drafted.tokens))
        return "logits"

    def read_tokens(self, drafted: Drafted) -> ProposedTokens:
        self.note("read_tokens", drafted.tokens)
        return ProposedTokens(np.asarray(drafted.tokens))

    def accept(self, logits: str, proposal: Any = None, masks: Any = None) -> Pending:
        self.note("accept", logits, proposal, masks)
        return self.pending()

    def propose(self, batch: Any) -> Drafted:
        self.note("propose", *batch)
        return Drafted(batch.limit, np.full((SLOTS, K), 7, np.int32))

    def proposal(self) -> Proposal:
        tokens = np.full((SLOTS, K), 7, np.int32)
        lengths = np.full(SLOTS, K, np.int32)
        return Proposal(tokens, lengths, tokens[..., None], np.ones((SLOTS, K, 1), np.float32))

    def pending(self) -> Pending:
        return Pending(hash(repr(self.calls)) % 2**31)


def plain(value: Any) -> Any:
    """Lists in place of arrays, tuples and records."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.astuple(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


@dataclasses.dataclass
class Pair:
    """Roles of both processes, those of the leader as its engine has them; `left` has why who
    ended, and a follower loads programs once it `may_load`."""

    leader: Leader
    follower: Follower
    target: MirroredTarget
    drafter: MirroredDrafter
    here: tuple[Scripted, Scripted]
    there: tuple[Scripted, Scripted]
    left: list[str]
    may_load: threading.Event

    def wait_left(self) -> str:
        """Why the first process ended."""
        end = time.monotonic() + 60
        while not self.left and time.monotonic() < end:
            time.sleep(0.01)
        return self.left[0]


@contextlib.contextmanager
def joined(monkeypatch, left):
    """A leader and a follower that know each other."""

    def leave(why: str, status: int) -> None:
        left.append(why)
        threading.Event().wait()  # nobody goes on after the end of a process

    monkeypatch.setattr(follower, "_REPORT_WAIT", 0.5)
    texts, made = Texts(), []
    thread = threading.Thread(
        target=lambda: made.append(Leader(texts.job(0), HOSTS, SILENCE, leave=leave))
    )
    thread.start()
    other = Follower(texts.job(1), HOSTS, SILENCE, leave=leave)
    thread.join(60)
    atexit.unregister(made[0]._at_exit)
    try:
        yield made[0], other
    finally:
        made[0].close()
        other.close()


@contextlib.contextmanager
def decoding(monkeypatch, *, mirrored: bool):
    """A `Pair` amid decoding; with `own` the drafter is on the target's devices."""
    left: list[str] = []
    with joined(monkeypatch, left) as (first, second):
        here, there = (Scripted(), Scripted()), (Scripted(), Scripted())
        roles = SimpleNamespace(target=there[0], drafter=there[1] if mirrored else None)
        loaded = threading.Event()

        def load(report: str) -> None:
            loaded.wait()
            there[0].note("load", report)

        about = (lambda *_about: roles), load
        threading.Thread(target=second.follow, args=about, daemon=True).start()
        engine, _ = first.new_engine("sd", K, lambda: None)
        drafter = MirroredDrafter(first, engine, here[1])
        target = MirroredTarget(first, engine, here[0], drafter if mirrored else None)
        yield Pair(first, second, target, drafter, here, there, left, loaded)
