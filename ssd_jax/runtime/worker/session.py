"""The worker's side of one stream: executes messages in order on a draft of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import BranchingDraft, Moved, News
from ssd_jax.runtime.worker.messages import (
    Expand,
    Hello,
    Move,
    Open,
    Ping,
    Prefill,
    ProtocolError,
    Round,
    Speculations,
    Stats,
    Welcome,
    Winner,
    Work,
)
from ssd_jax.runtime.worker.work_log import WorkLog
from ssd_jax.speculation.confidence import UNKNOWN


class GrowingDraft(BranchingDraft, Protocol):
    """A draft whose expansion can be run one forward at a time."""

    def grow(self, lowered: np.ndarray) -> None:
        """One forward more of all branches; see `roles.BranchingDraft.expand`."""
        ...

    def news(self, forwards: int) -> News:
        """Waits for the branches as they are now."""
        ...

    def finish(self) -> None:
        """Waits for all that was dispatched."""
        ...


@dataclasses.dataclass
class _Slot:
    """Attributes:
    epoch: of its request; 0 before the first.
    length: positions whose tokens are known.
    """

    epoch: int = 0
    length: int = 0


class Session:
    """One stream's slots, records and branches.

    Args:
      about: what the worker is; a `Hello` must say the same.
      draft: makes the draft, when a `Hello` was right.
      called: whether another round waits: an expansion is then not grown any further.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        about: Hello,
        draft: Callable[[], GrowingDraft],
        called: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._about, self._new, self._called, self._clock = about, draft, called, clock
        self._work = WorkLog(clock)
        self._draft: GrowingDraft | None = None
        self._slots = [_Slot() for _ in range(about.slots)]
        self._last = 0  # number of the last message
        self._stats = Stats(number=0, rounds=0, forwards=0, cut=0, stale=0, busy=0.0, clock=0.0)

    def handle(self, message: Any) -> Iterator[Any]:
        """Executes a message; yields the answers as they are known.

        Raises:
          ProtocolError: it does not fit.
        """
        if isinstance(message, Hello):
            yield self._greet(message)
            return
        if self._draft is None:
            raise ProtocolError("a stream begins with a Hello")
        if not isinstance(message, Open | Prefill | Round | Ping):
            raise ProtocolError(f"a {type(message).__name__} is not for a worker")
        if message.number <= self._last:
            self._count(stale=1)
            return
        self._last = message.number
        match message:
            case Open():
                self._open(self._draft, message)
            case Prefill():
                self._prefill(self._draft, message)
            case Round():
                began = self._clock()
                yield from self._round(self._draft, message)
                self._count(busy=self._clock() - began)
            case Ping():
                yield dataclasses.replace(self._stats, number=message.number, clock=self._clock())

    def _greet(self, hello: Hello) -> Welcome:
        for field in dataclasses.fields(Hello):
            asked, here = getattr(hello, field.name), getattr(self._about, field.name)
            if asked != here:
                raise ProtocolError(
                    f"the worker's {field.name} is another: {here!r}, not {asked!r}"
                )
        self._draft = self._draft or self._new()
        return Welcome()

    def _open(self, draft: GrowingDraft, message: Open) -> None:
        message.check(self._about)
        slot = self._slots[message.slot]
        if message.epoch <= slot.epoch:
            self._count(stale=1)
            return
        try:
            params = SamplingParams(
                temperature=message.temperature,
                top_k=message.top_k,
                top_p=message.top_p,
                min_p=message.min_p,
                repetition_penalty=message.repetition_penalty,
                frequency_penalty=message.frequency_penalty,
                presence_penalty=message.presence_penalty,
                logit_bias=message.logit_bias,
                seed=message.seed,
            )
        except InputError as error:
            raise ProtocolError(f"sampling: {error}") from None
        draft.open(message.slot, params, message.index, message.banned, message.ban_before)
        slot.epoch, slot.length = message.epoch, 0

    def _prefill(self, draft: GrowingDraft, message: Prefill) -> None:
        if not self._current(message):
            return
        slot, tokens = self._slots[message.slot], message.tokens.tolist()
        if message.tokens.ndim != 1 or message.tokens.dtype.kind != "i" or not tokens:
            raise ProtocolError("a Prefill is a row of tokens")
        self._about.check_ids(tokens)
        end = message.offset + len(tokens)
        if not 0 <= message.offset <= slot.length or end > self._about.context:
            raise ProtocolError(
                f"tokens at {message.offset} to {end - 1}, where {slot.length} are known"
            )
        self._work.begin()
        draft.prefill(message.slot, tokens, message.offset)
        slot.length = end
        draft.finish()  # so that its time is not another's
        self._work.end("prefill")

    def _round(self, draft: GrowingDraft, message: Round) -> Iterator[Any]:
        message.check(self._about)
        lowered = message.lowered
        moves = [move for move in message.moves if self._current(move)]
        if message.moves:
            yield from self._move(draft, message, moves, lowered)
        if message.expand is not None:
            if not moves:
                self._work.begin()
            yield from self._expand(draft, message.number, message.expand, lowered)

    def _move(
        self, draft: GrowingDraft, message: Round, moves: list[Move], lowered: np.ndarray
    ) -> Iterator[Winner]:
        limits = np.zeros(self._about.slots, np.int32)
        for move in moves:
            slot = self._slots[move.slot]
            if move.position >= slot.length + len(move.committed):
                raise ProtocolError(f"position {move.position}, where {slot.length} are known")
            slot.length = move.position + 1
            limits[move.slot] = move.draft
        if not moves:
            return
        self._work.begin()
        draft.move(
            [
                Moved(
                    slot=move.slot,
                    position=move.position,
                    pending=move.pending,
                    committed=move.committed,
                    winner=move.winner,
                    tokens=move.tokens,
                    limit=move.limit,
                )
                for move in moves
            ]
        )
        if limits.any():
            draft.draft(limits, lowered=lowered)
        wanted = [move for move in moves if move.draft or (move.sampled and move.winner >= 0)]
        if wanted:
            proposal, confidence = _on_host(draft.proposal()), draft.confidence()
            self._work.end("draft" if limits.any() else "promote")
            yield _winner(message.number, wanted, proposal, confidence, self._work.take())
            self._work.begin()

    def _expand(
        self, draft: GrowingDraft, number: int, expand: Expand, lowered: np.ndarray
    ) -> Iterator[Speculations]:
        forks = [fork for fork in expand.forks if self._current(fork)]
        if not forks:  # an engine waits for an answer to every round
            work = self._work.take()
            yield _speculations(number, [], no_news(self._about), complete=True, work=work)
            return
        counts = np.zeros((self._about.slots, self._about.k + 1), np.int32)
        follow = np.zeros(self._about.slots, bool)
        for fork in forks:
            counts[fork.slot], follow[fork.slot] = fork.counts, fork.follow
        draft.expand(counts, follow=follow, lowered=lowered, forwards=1)
        done, what = 1, "expand"
        while True:
            news = draft.news(done)
            self._work.end(what)
            work, complete = self._work.take(), done == expand.forwards
            if not complete and self._called():
                self._count(cut=1)
                complete = True
            # A forward begins before what is known is sent, so that the draft hardly idles, but not
            # before the one before it has ended: nobody is to wait for two when the next round is
            # there.
            if not complete:
                draft.grow(lowered)
            yield _speculations(number, forks, news, complete=complete, work=work)
            if complete:
                break
            done, what = done + 1, "grow"
        self._count(rounds=1, forwards=done)

    def _current(self, part: Prefill | Move | Any) -> bool:
        """Whether it is of the slot's present request; counts those that are not."""
        self._about.check_slot(part.slot)
        current = 0 < part.epoch == self._slots[part.slot].epoch
        if not current:
            self._count(stale=1)
        return current

    def _count(self, **more: float) -> None:
        own = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = dataclasses.replace(self._stats, **own)


def _int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _on_host(proposal: Any) -> Any:
    """A proposal whose arrays have been waited for."""
    return proposal._replace(**{name: np.asarray(a) for name, a in proposal._asdict().items()})


def _winner(
    number: int,
    wanted: list[Move],
    proposal: Any,
    confidence: np.ndarray,
    work: tuple[Work, ...],
) -> Winner:
    rows = _int32([move.slot for move in wanted])
    sampled = [move.slot for move in wanted if move.sampled]
    return Winner(
        number=number,
        slots=rows,
        epochs=_int32([move.epoch for move in wanted]),
        lengths=proposal.length[rows],
        tokens=proposal.tokens[rows],
        confidence=confidence[rows],
        sampled=tuple(sampled),
        support=proposal.support[sampled],
        q=proposal.q[sampled],
        work=work,
    )


def no_news(about: Hello) -> News:
    """No branches."""
    shape = about.slots, about.branches
    of_tokens = (*shape, about.k)
    return News(
        np.zeros((about.slots, about.k), np.int32),
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(of_tokens, np.int32),
        np.full(of_tokens, UNKNOWN, np.int32),
        0,
    )


def _speculations(
    number: int, forks: list[Any], news: News, *, complete: bool, work: tuple[Work, ...]
) -> Speculations:
    rows = _int32([fork.slot for fork in forks])
    return Speculations(
        number=number,
        complete=complete,
        slots=rows,
        epochs=_int32([fork.epoch for fork in forks]),
        bonus=news.bonus[rows],
        lengths=news.lengths[rows],
        tokens=news.tokens[rows],
        confidence=news.confidence[rows],
        work=work,
    )
