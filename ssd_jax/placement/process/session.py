"""The worker's side of one stream: executes messages in order on its own draft."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import (
    IDLE,
    BranchTokens,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Share,
    no_branches,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.wire.draft_spec import DraftMessage, DraftSpec
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import (
    MAX_WORK,
    BranchMessage,
    ExpandMessage,
    MorePages,
    Open,
    Prefill,
    RecordMessage,
    RecordTokens,
    Welcome,
    Work,
)


class ReadableRecords(RecordAnswer, Protocol):
    """Records whose proposals can be read."""

    def proposal(self) -> Proposal:
        """The records' proposals, in arrays that can be read."""
        ...


class GrowingBranches(ExpansionAnswer, Protocol):
    """Branches that can be run one forward at a time."""

    def grow(self) -> None:
        """Runs one more forward of all branches."""
        ...

    def branches(self, forwards: int, until: Callable[[], bool] | None = None) -> BranchTokens:
        """Waits for the branches as dispatched so far."""
        ...


class GrowingDraft(BranchingDraft, Protocol):
    """A draft whose expansions can run one forward at a time."""

    def record(self, request: RecordRequest) -> ReadableRecords:
        """Gives slots new records, as `BranchingDraft.record`."""
        ...

    def expand(self, request: ExpansionRequest) -> GrowingBranches:
        """Branches off every record, as `BranchingDraft.expand`."""
        ...

    def finish(self) -> None:
        """Waits for everything that was dispatched."""
        ...


class DraftSession:
    """One stream's slots, records and branches.

    Args:
      spec: what the worker is; a `DraftSpec` must be equal.
      draft: makes the draft, once a `DraftSpec` was right.
      round_waits: whether another round waits; an expansion is then not grown any further.
      clock: seconds, monotonic and the same for all processes of a host.

    Attributes:
      counters: "rounds" with an expansion, "forwards" of expansions, expansions "cut" short by the
        next round, and "stale": messages and rows that came too late or twice.
    """

    def __init__(
        self,
        spec: DraftSpec,
        draft: Callable[[], GrowingDraft],
        round_waits: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._spec = spec
        self._make_draft = draft
        self._round_waits = round_waits
        self._clock = clock
        self._work_begin = 0.0  # when the work began that is not reported yet
        self._work: deque[Work] = deque(maxlen=MAX_WORK)  # drops the oldest
        self._draft: GrowingDraft | None = None
        self._epochs = np.zeros(spec.slots, np.int32)  # of the slots' requests, from 1
        self._known_lengths = np.zeros(spec.slots, np.int32)  # positions whose tokens are known
        self._last_number = 0  # number of the last message
        self._received = 0.0  # when the last request of a round came

    def handle(self, message: DraftMessage) -> Iterator[DraftMessage]:
        """Executes a valid message; yields the answers as they become known.

        Raises:
          ProtocolError: the message does not fit earlier ones.
        """
        if isinstance(message, DraftSpec):
            yield self._greet(message)
            return
        if self._draft is None:
            raise ProtocolError("a stream begins with a DraftSpec")
        if not isinstance(message, Open | MorePages | Prefill | RecordMessage | ExpandMessage):
            raise ProtocolError(f"a {type(message).__name__} is not for a worker")
        if message.number <= self._last_number:
            self.counters["stale"] += 1
            return
        self._last_number = message.number
        match message:
            case Open():
                self._open(self._draft, message)
            case MorePages():
                if self._is_current(message):
                    self._draft.set_pages(message.slot, message.pages)
            case Prefill():
                self._prefill(self._draft, message)
            case RecordMessage():
                yield from self._record(self._draft, message)
            case ExpandMessage():
                yield from self._expand(self._draft, message)

    def _greet(self, spec: DraftSpec) -> Welcome:
        difference = self._spec.difference(spec)
        if difference is not None:
            raise ProtocolError(f"the worker's {difference}")
        self._draft = self._draft or self._make_draft()
        return Welcome()

    def _open(self, draft: GrowingDraft, message: Open) -> None:
        slot = message.opening.slot
        if message.epoch <= self._epochs[slot]:
            self.counters["stale"] += 1
            return
        draft.open(message.opening)
        self._epochs[slot], self._known_lengths[slot] = message.epoch, 0

    def _is_current(self, message: MorePages | Prefill) -> bool:
        """Whether a message is about the slot's current request."""
        current = 0 < message.epoch == self._epochs[message.slot]
        self.counters["stale"] += not current
        return current

    def _prefill(self, draft: GrowingDraft, message: Prefill) -> None:
        slot, offset = message.slot, message.offset
        if not self._is_current(message):
            return
        if offset > self._known_lengths[slot]:
            raise ProtocolError(
                f"tokens from {offset} on, where {self._known_lengths[slot]} are known"
            )
        self._begin()
        draft.prefill(slot, message.tokens.tolist(), offset)
        self._known_lengths[slot] = offset + message.tokens.size
        draft.finish()  # so that its time is not counted for other work
        self._end("prefill")

    def _current(self, message: RecordMessage | ExpandMessage, rows: np.ndarray) -> np.ndarray:
        """Those of these rows [B] whose request is still the slot's; others count as stale."""
        self._received = self._clock()
        current = (message.epochs > 0) & (message.epochs == self._epochs)
        self.counters["stale"] += int((rows & ~current).sum())
        return rows & current

    def _record(self, draft: GrowingDraft, message: RecordMessage) -> Iterator[RecordTokens]:
        rows = self._current(message, np.asarray(message.position != IDLE))
        if not rows.any():
            return
        lengths_known = self._known_lengths + (message.committed >= 0).sum(axis=1)
        gaps = rows & (message.position >= lengths_known)
        if gaps.any():
            slot = int(gaps.argmax())
            raise ProtocolError(
                f"position {message.position[slot]}, where {self._known_lengths[slot]} are known"
            )
        self._known_lengths = np.where(rows, message.position + 1, self._known_lengths)
        drafts = np.where(rows, message.drafts, 0)
        self._begin()
        promotion = Promotion(
            position=np.where(rows, message.position, IDLE),
            pending=message.pending,
            committed=np.where(rows[:, None], message.committed, -1),
            winner=message.winner,
            tokens=message.tokens,
            limit=message.limit,
            node=message.node if self._spec.nodes else None,
            parents=message.parents if self._spec.nodes else None,
        )
        answer = draft.record(RecordRequest(promotion, drafts, message.lowered))
        sampled = message.sampled > 0
        answered = rows & ((drafts > 0) | (sampled & (message.winner >= 0)))
        if not answered.any():
            return
        tokens, lengths, support, q = map(np.asarray, answer.proposal())  # waits for the arrays
        parents, confidence = answer.parents(), answer.confidence()
        if parents is None:
            parents = np.empty((len(tokens), 0), np.int32)
        self._end("draft" if drafts.any() else "promote")
        slots, of_q = np.flatnonzero(answered), np.flatnonzero(answered & sampled)
        yield RecordTokens(
            **self._header(message, slots),
            lengths=lengths[slots],
            tokens=tokens[slots],
            parents=np.asarray(parents)[slots],
            confidence=confidence[slots],
            sampled=of_q,
            support=support[of_q],
            q=q[of_q],
        )

    def _expand(self, draft: GrowingDraft, message: ExpandMessage) -> Iterator[BranchMessage]:
        rows = self._current(message, np.asarray(message.counts.any(axis=1)))
        if not rows.any():
            spec = self._spec
            sizes = spec.slots, spec.branches, spec.k
            none = no_branches(*sizes, message.forwards, spec.nodes)
            yield self._branches(message, rows, none, complete=True)
            return
        self._begin()
        answer = draft.expand(
            ExpansionRequest(
                counts=np.where(rows[:, None], message.counts, 0),
                follow=rows & (message.follow > 0),
                lowered=message.lowered,
                forwards=1,
                skip=message.skip,
                share=Share(message.part, message.parts),
            )
        )
        forwards, kind = 1, "expand"
        while True:
            branches = answer.branches(forwards)
            self._end(kind)
            complete = forwards == message.forwards
            if not complete and self._round_waits():
                self.counters["cut"] += 1
                complete = True
            # The next forward begins before the branches are sent, so that the draft hardly idles,
            # but only after the previous one has ended: the next round must not wait for two.
            if not complete:
                answer.grow()
            yield self._branches(message, rows, branches, complete=complete)
            if complete:
                self.counters += Counter(rounds=1, forwards=forwards)
                return
            forwards, kind = forwards + 1, "grow"

    def _branches(
        self, message: ExpandMessage, rows: np.ndarray, branches: BranchTokens, *, complete: bool
    ) -> BranchMessage:
        slots = np.flatnonzero(rows)
        bonus, lengths, tokens, confidence, forwards, _, trees = branches
        none = len(rows), 0, 0
        node, parents = trees or (np.empty(none[:2], np.int32), np.empty(none, np.int32))
        return BranchMessage(
            **self._header(message, slots),
            complete=complete,
            forwards=forwards,
            bonus=bonus[slots],
            lengths=lengths[slots],
            tokens=tokens[slots],
            confidence=confidence[slots],
            node=node[slots],
            parents=parents[slots],
        )

    def _begin(self) -> None:
        """Records that work begins after a pause."""
        self._work_begin = self._clock()

    def _end(self, kind: str) -> None:
        """Records that the work dispatched so far has ended; the next begins on the device now."""
        now = self._clock()
        self._work.append(Work(kind, self._work_begin, now))
        self._work_begin = now

    def _header(self, message: RecordMessage | ExpandMessage, slots: np.ndarray) -> dict[str, Any]:
        """The fields of a `RoundAnswer` that covers these slots; its work is reported once."""
        work = tuple(self._work)
        self._work.clear()
        return {
            "number": message.number,
            "work": work,
            "slots": slots,
            "epochs": self._epochs[slots],
            "received": self._received,
            "sent": self._clock(),
        }
