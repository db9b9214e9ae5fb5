"""The messages between an engine and its draft worker; docs/protocol.md says when each is sent.

Whoever receives one checks it against what both sides agreed on, the `Hello`: whatever does not fit
is a `ProtocolError`, never an index out of range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ssd_jax.runtime.activity import WORK
from ssd_jax.runtime.request import MAX_STOP_IDS
from ssd_jax.speculation.confidence import EDGES, UNKNOWN

MAX_WORK = 256
"""Most spans of work that an answer tells of."""
_LATEST = 1e10  # seconds on a monotonic clock: three hundred years


class ProtocolError(Exception):
    """What came over the stream is not what the protocol allows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """Opens a stream: what the engine takes the draft to be.

    Attributes:
      model: fingerprint of the draft, see `OpenedModel`.
      slots, context, tokens: B, most positions of a sequence, how many ids exist.
      k, branches, support: K, M and N of the worker's programs.
      rule: of the verification, "ratio" or "coupled".
    """

    model: str
    slots: int
    context: int
    tokens: int
    k: int
    branches: int
    support: int
    rule: str

    def check_slot(self, slot: int) -> None:
        """Raises: ProtocolError: no such slot."""
        _within("slot", slot, self.slots)

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises: ProtocolError: one is no token."""
        for token in ids:
            _within("token", token, self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Welcome:
    """Answers a `Hello` that fits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """The last message of a worker that gives a stream up, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
    """A new request in a slot. `number` counts the engine's messages; an old one is a replay.

    Attributes:
      epoch: of the slot; messages of earlier ones are stale.
      others: see `runtime.request.SamplingParams` and `roles.Target.open`.
    """

    number: int
    slot: int
    epoch: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int
    index: int
    banned: tuple[int, ...]
    ban_before: int

    def check(self, about: Hello) -> None:
        """Raises: ProtocolError: it does not fit. The sampling parameters check themselves."""
        about.check_slot(self.slot)
        about.check_ids((*self.banned, *(token for token, _ in self.logit_bias)))
        _within("number of banned ids", len(self.banned), MAX_STOP_IDS + 1)
        _within("index", self.index, 2**32)
        _within("ban_before", self.ban_before, about.context + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """Tokens [n] int32 from position `offset` on: of the prompt, or committed ones to catch up."""

    number: int
    slot: int
    epoch: int
    offset: int
    tokens: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """A slot's new record; see `roles.Moved`.

    Attributes:
      committed: output tokens since the slot's last move, however many.
      draft: tokens to draft just in time; 0 is none.
      sampled: whether the verification needs the q of tokens that the draft made.
    """

    slot: int
    epoch: int
    position: int
    pending: int
    committed: tuple[int, ...]
    winner: int
    limit: int
    tokens: tuple[int, ...]
    draft: int
    sampled: bool

    def check(self, about: Hello) -> None:
        """Raises: ProtocolError: it does not fit."""
        about.check_slot(self.slot)
        about.check_ids((*self.committed, *self.tokens, self.pending))
        _within("position", self.position, about.context)
        _within("winner", self.winner + 1, about.branches + 1)
        for name, count in (("limit", self.limit), ("draft", self.draft)):
            _within(name, count, about.k + 1)
        _within("number of tokens", len(self.tokens), about.k + 1)
        if self.winner >= 0 and (self.tokens or self.draft):
            raise ProtocolError("a record is a branch, given tokens, or drafted: one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fork:
    """How a slot's record is branched: F_0..F_K; `follow` if it has tokens of the host."""

    slot: int
    epoch: int
    counts: tuple[int, ...]
    follow: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expand:
    """See `roles.BranchingDraft.expand`."""

    forks: tuple[Fork, ...]
    forwards: int

    def check(self, about: Hello) -> None:
        """Raises: ProtocolError: it does not fit."""
        for fork in self.forks:
            about.check_slot(fork.slot)
            if len(fork.counts) != about.k + 1 or min(fork.counts) < 0:
                raise ProtocolError(f"{fork.counts} is no fan-out for K = {about.k}")
            _within("number of branches", sum(fork.counts), about.branches + 1)
        _within("forwards", self.forwards - 1, about.k + 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """New records of all slots that go on, and their expansion. Without moves records stay.

    Attributes:
      lowered: [B, K] int32, D of Saguaro sampling for each token that is drafted.
    """

    number: int
    moves: tuple[Move, ...]
    lowered: np.ndarray
    expand: Expand | None

    def check(self, about: Hello) -> None:
        """Raises: ProtocolError: it does not fit."""
        _shape(self.lowered, (about.slots, about.k), "i")
        _all_within(self.lowered, 0, 2**31)
        for move in self.moves:
            move.check(about)
        if self.expand is not None:
            self.expand.check(about)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A span of the worker's work; see `activity.Busy`.

    Attributes:
      begin, end: seconds on the worker's monotonic clock.
    """

    what: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Winner:
    """Tokens of records that the draft made, and their q.

    Attributes:
      number: of the round that it answers.
      slots, epochs, lengths: [R] int32.
      tokens, confidence: [R, K] int32; see `roles.News`.
      sampled: those of `slots` whose q was asked for, S of them.
      support, q: [S, K, N] int32 and float32; see `speculation.proposal.Proposal`.
      work: what the worker has done since its last answer.
    """

    number: int
    slots: np.ndarray
    epochs: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray
    sampled: tuple[int, ...]
    support: np.ndarray
    q: np.ndarray
    work: tuple[Work, ...] = ()

    def check(self, about: Hello) -> None:
        """Raises: ProtocolError: something does not fit. q is checked by row."""
        _check_work(self.work)
        rows, sampled = self.slots.size, len(self.sampled)
        for array in (self.slots, self.epochs, self.lengths):
            _shape(array, (rows,), "i")
        _shape(self.tokens, (rows, about.k), "i")
        _shape(self.confidence, (rows, about.k), "i")
        _all_within(self.confidence, UNKNOWN, len(EDGES) + 1)
        _shape(self.support, (sampled, about.k, about.support), "i")
        _shape(self.q, (sampled, about.k, about.support), "f")
        _all_within(self.slots, 0, about.slots)
        _all_within(self.lengths, 0, about.k + 1)
        _all_within(self.tokens, 0, about.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculations:
    """What the branches say so far; see `roles.News`.

    Attributes:
      number: of the round whose expansion it is of.
      complete: no more tokens will come.
      slots, epochs: [R] int32.
      bonus, lengths: [R, M] int32.
      tokens, confidence: [R, M, K] int32.
      work: what the worker has done since its last answer.
    """

    number: int
    complete: bool
    slots: np.ndarray
    epochs: np.ndarray
    bonus: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray
    work: tuple[Work, ...] = ()

    def check(self, about: Hello) -> None:
        """Raises: ProtocolError: something does not fit."""
        _check_work(self.work)
        rows = self.slots.size
        for array in (self.slots, self.epochs):
            _shape(array, (rows,), "i")
        _shape(self.bonus, (rows, about.branches), "i")
        _shape(self.lengths, (rows, about.branches), "i")
        _shape(self.tokens, (rows, about.branches, about.k), "i")
        _shape(self.confidence, (rows, about.branches, about.k), "i")
        _all_within(self.confidence, UNKNOWN, len(EDGES) + 1)
        _all_within(self.slots, 0, about.slots)
        _all_within(self.bonus, -1, about.tokens)
        _all_within(self.lengths, 0, about.k + 1)
        _all_within(self.tokens, 0, about.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ping:
    """Asks for `Stats`."""

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """What this stream has cost the worker.

    Attributes:
      rounds: with an expansion.
      forwards: of expansions.
      cut: expansions that the next round ended early.
      stale: messages and rows that came too late or twice.
      busy: seconds at work on rounds.
      clock: seconds that the worker's monotonic clock shows, by which `Work` is told.
    """

    number: int
    rounds: int
    forwards: int
    cut: int
    stale: int
    busy: float
    clock: float

    def check(self) -> None:
        """Raises: ProtocolError: times or counts that cannot be."""
        counts = self.rounds, self.forwards, self.cut, self.stale
        if min(counts) < 0 or not _is_time(self.busy) or not _is_time(self.clock):
            raise ProtocolError(f"figures that cannot be: {self}")


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds < _LATEST


def _check_work(work: Sequence[Work]) -> None:
    _within("number of spans of work", len(work), MAX_WORK + 1)
    until = 0.0
    for span in work:
        if span.what not in WORK:
            raise ProtocolError(f"{span.what[:40]!r} is no work")
        if not (_is_time(span.begin) and _is_time(span.end) and until <= span.begin <= span.end):
            raise ProtocolError(f"work from {span.begin} to {span.end}, after {until}")
        until = span.end


def _within(name: str, value: int, end: int) -> None:
    if not 0 <= value < end:
        raise ProtocolError(f"{name} {value} is not within 0 to {end - 1}")


def _all_within(array: np.ndarray, start: int, end: int) -> None:
    if array.size and not (start <= array.min() and array.max() < end):
        raise ProtocolError(f"values from {array.min()} to {array.max()}, not {start} to {end - 1}")


def _shape(array: np.ndarray, shape: tuple[int, ...], kind: str) -> None:
    if array.shape != shape or array.dtype.kind != kind:
        raise ProtocolError(f"an array {array.dtype}{array.shape} instead of {kind}{shape}")
