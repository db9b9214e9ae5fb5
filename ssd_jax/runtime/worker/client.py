"""The engine's side of a draft in a worker: `roles.BranchingDraft` over a stream.

Each round waits for the answer to the one before it, but not for long. While an answer is overdue
nothing else is sent; when it has come, every slot catches up by a `Prefill` of the tokens that the
worker has missed. A worker that is late or dead therefore costs speed only, and a stopped one never
finds a heap of messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ssd_jax.runtime.activity import Activity
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Absence, Moved, News
from ssd_jax.runtime.worker.connection import Connection
from ssd_jax.runtime.worker.hang import SILENCE, HangLimit
from ssd_jax.runtime.worker.messages import (
    Expand,
    Fork,
    Hello,
    Move,
    Round,
    Stats,
)
from ssd_jax.runtime.worker.proposals import HostProposals
from ssd_jax.runtime.worker.texts import SlotText, opening_of
from ssd_jax.speculation.confidence import UNKNOWN

PATIENCE = 1.0
"""Seconds that a round waits for a worker."""
_LOOK = 0.1  # seconds
_LOG = logging.getLogger(__name__)


class RemoteDraft:
    """See `roles.BranchingDraft`; every call but `draft`, `news` and `settled` only sends.

    Args:
      hello: what the worker is.
      connect: gives a new connection, None where there is no worker now.
      greedy: the draft proposes its likeliest tokens whatever the request samples.
      patience: seconds to wait for an answer.
      counters: what happened: "late", "stale", "dead", "hung", "q late", "q malformed",
        "connections".
      address: of the worker that there is now, None for none; by default the last connection's.
      end: ends the worker at an address, which hangs.
      limit: when it is taken to, for an answer that is owed.
      silence: the same for a sign of life.
    """

    def __init__(
        self,
        hello: Hello,
        connect: Callable[[], Connection | None],
        *,
        greedy: bool = False,
        patience: float = PATIENCE,
        counters: Counter[str] | None = None,
        address: Callable[[], str | None] | None = None,
        end: Callable[[str], None] = lambda address: None,
        limit: HangLimit | None = None,
        silence: HangLimit | None = None,
    ) -> None:
        self.slots, self.k, self.branches = hello.slots, hello.k, hello.branches
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._q_travels = hello.rule == "ratio" and not greedy
        self._connect, self._patience = connect, patience
        self._address = address
        self._end, self._limit = end, limit or HangLimit()
        self._silence = silence or HangLimit(SILENCE, forgets=True)
        self._trouble = self._told = ""
        self._connection: Connection | None = None
        self._ended: Connection | None = None  # the one before it
        self._numbers = itertools.count(1)
        self._epochs = itertools.count(1)
        self._slots: dict[int, SlotText] = {}
        self._absence: Absence = "dead"
        self._overdue = False  # an answer that was waited for did not come
        self._link: Connection | None = None  # that this round's records went to
        self._moves: list[Move] = []  # not sent yet
        self._records: dict[int, bool] = {}  # slots with a record: whether it is to be followed
        self._asked_q: list[int] = []
        self._awaited = False  # the branches of the last `expand`
        self._counted = False  # why this round had no answer
        self._news: News | None = None
        self._proposals = HostProposals(hello.slots, hello.k, hello.support, hello.tokens)
        self._confidence = np.full((hello.slots, hello.k), UNKNOWN, np.int32)

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.BranchingDraft.open`."""
        opening = opening_of(params, index, banned, ban_before)
        opening = dataclasses.replace(opening, slot=slot, epoch=next(self._epochs))
        sampled = self._q_travels and params.temperature > 0
        self._slots[slot] = SlotText(opening=opening, sampled=sampled)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `roles.BranchingDraft.prefill`."""
        state = self._slots[slot]
        state.text[offset:] = tokens
        state.prompt = len(state.text)
        link = self._usable()
        if link is not None:
            with self._telling(link):
                state.teach(link, self._numbers)

    def move(self, moves: Sequence[Moved]) -> None:
        """See `roles.BranchingDraft.move`."""
        self._flush()
        link = self._link = self._usable()
        self._moves, self._records, self._asked_q = [], {}, []
        self._counted = False
        with self._telling(link):
            self._move(moves, link)

    def _move(self, moves: Sequence[Moved], link: Connection | None) -> None:
        told = self._news  # until there is other news: an interrupted call comes again
        self._proposals.clear()
        self._confidence[:] = UNKNOWN
        moved_slots = {moved.slot for moved in moves}
        for slot, state in self._slots.items():
            state.whole = state.whole and link is not None and slot in moved_slots
        for moved in moves:
            state = self._slots[moved.slot]
            # What an interrupted step has told already comes again.
            state.text[moved.position + 1 - len(moved.committed) :] = moved.committed
            tokens = tuple(int(token) for token in moved.tokens)
            winner, limit = moved.winner, len(tokens)
            if winner >= 0:
                assert told is not None
                limit = min(moved.limit, int(told.lengths[moved.slot, winner]))
                tokens = tuple(told.tokens[moved.slot, winner, :limit].tolist())
            self._proposals.put(moved.slot, tokens)
            if link is None:
                continue
            if state.link is not link or state.known == moved.position:
                winner = -1  # the branch is gone, with its worker or with an interrupted step
            elif winner >= 0:
                tokens = ()
            if not state.whole:
                state.teach(link, self._numbers)
            state.whole = False  # until this record is expanded
            self._moves.append(state.moved(moved, winner, limit, tokens))
            self._records[moved.slot] = bool(tokens)
            if winner >= 0 and limit and state.sampled:
                self._asked_q.append(moved.slot)

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> np.ndarray:
        """See `roles.BranchingDraft.draft`; waits for the worker."""
        drafted = np.zeros(self.slots, np.int32)
        link = self._link
        if link is None:
            return drafted
        moves = [dataclasses.replace(m, draft=int(limits[m.slot])) for m in self._moves]
        self._send_round(link, moves, lowered, None)
        winner = link.winner(self._patience)
        if winner is None:
            self._give_up(link)
            self._count_absence()
            self._link = None
            return drafted
        for row, (slot, epoch) in enumerate(zip(winner.slots, winner.epochs, strict=True)):
            if limits[slot] and epoch == self._slots[slot].epoch:
                drafted[slot] = min(winner.lengths[row], limits[slot])
                self._proposals.put(slot, winner.tokens[row, : drafted[slot]].tolist())
                self._confidence[slot] = winner.confidence[row]
                self._asked_q += [slot] if self._slots[slot].sampled else []
        self._take_q()
        return drafted

    def proposal(self) -> Any:
        """See `roles.BranchingDraft.proposal`: point masses where q has not come yet."""
        return self._proposals.now()

    def confidence(self) -> np.ndarray:
        """See `roles.BranchingDraft.confidence`: known since they were drafted."""
        return self._confidence

    def settled(self) -> Any:
        """The proposals with their q: waits for what is still on its way."""
        self._flush()
        self._take_q()
        return self._proposals.now()

    def expand(
        self, counts: np.ndarray, *, follow: np.ndarray, lowered: np.ndarray, forwards: int
    ) -> None:
        """See `roles.BranchingDraft.expand`."""
        link = self._link
        self._awaited = link is not None
        if link is None:
            return
        forks = tuple(
            Fork(
                slot=slot,
                epoch=self._slots[slot].epoch,
                counts=tuple(counts[slot].tolist()),
                follow=given,
            )
            for slot, given in self._records.items()
            if counts[slot].any()  # a record near the end of its text has no branches
        )
        expand = Expand(forks=forks, forwards=forwards)
        self._send_round(link, self._moves, lowered, expand)
        for fork in forks:
            self._slots[fork.slot].whole = True

    def news(self, forwards: int) -> News | Absence:
        """See `roles.BranchingDraft.news`; waits no longer than its patience."""
        link = self._link
        answer, made = None, 0
        if self._awaited and link is not None:
            answer, made = link.speculations(forwards, self._patience)
            if answer is None:
                self._give_up(link)
        if answer is None:
            self._count_absence()
            return self._absence
        shape = self.slots, self.branches
        news = News(
            self._proposals.tokens.copy(),
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.int32),
            np.zeros((*shape, self.k), np.int32),
            np.full((*shape, self.k), UNKNOWN, np.int32),
            made,
        )
        for row, (slot, epoch) in enumerate(zip(answer.slots, answer.epochs, strict=True)):
            if slot in self._slots and epoch == self._slots[slot].epoch:
                news.bonus[slot], news.lengths[slot] = answer.bonus[row], answer.lengths[row]
                news.tokens[slot] = answer.tokens[row]
                news.confidence[slot] = answer.confidence[row]
        self._news = news
        return news

    def stats(self, timeout: float = PATIENCE) -> Stats | None:
        """What this draft has cost the worker; None if it does not answer."""
        link = self._connection
        if link is None or not link.ready:
            return None
        number = next(self._numbers)
        link.ping(number)
        return link.stats(number, timeout)

    def activity(self) -> Activity:
        """What the worker has done since this was last called, as far as it has said."""
        link = self._connection
        if link is None:
            return Activity()
        return link.activity({slot: state.epoch for slot, state in self._slots.items()})

    def wait_ready(self, timeout: float) -> bool:
        """Waits for a worker that agrees to the `Hello`, started again meanwhile or not."""
        end = time.monotonic() + timeout
        while time.monotonic() < end and not self.refused:
            if self._usable() is not None:
                return True
            if self._connection is None or not self._connection.alive:
                time.sleep(_LOOK)
            else:
                self._connection.wait_ready(_LOOK)
        return False

    @property
    def refused(self) -> bool:
        """Whether the worker does not agree to the `Hello`."""
        return self._connection is not None and self._connection.refused

    @property
    def trouble(self) -> str:
        """Why the last stream that has ended did."""
        return (self._connection and self._connection.trouble) or self._trouble

    def close(self) -> None:
        """Ends the stream; the worker then frees the slots."""
        if self._connection is not None:
            self._connection.close()

    def _usable(self) -> Connection | None:
        """The connection, unless an answer is overdue; connects anew if need be."""
        if self._connection is None or not self._connection.alive:
            if self._connection is not None:
                self._connection.close()
                self._tell_end(self._connection)
                self._ended = self._connection
            self._connection = self._connect()
            self._overdue = False
            self.counters["connections"] += self._connection is not None
        link = self._connection
        if link is None or not link.ready:
            self._absence = "dead"
        elif self._overdue and not link.answered:
            self._absence = "stale"
        else:
            self._overdue = False
            self._limit.settled()
            self._silence.settled()
            link.keep_time(self._numbers)
            return link
        self._end_if_it_hangs(link or self._ended)
        return None

    def _end_if_it_hangs(self, link: Connection | None) -> None:
        """What a worker owes, it owes over any number of streams.

        Args:
          link: the last one to it.
        """
        where = self._address() if self._address else link and link.address
        if where is None or (link is not None and link.refused):  # none there, or one that answers
            self._limit.settled()
            self._silence.settled()
            return
        self._limit.owed(where)
        if link is not None and link.heard:
            self._silence.settled()
        else:
            self._silence.owed(where)
        silent = self._silence.reached()
        if silent or self._limit.reached():
            self.counters["hung"] += 1
            what = "gives no sign of life" if silent else "has not answered for long"
            _LOG.warning("the draft worker %s; another is started", what)
            self._end(where)
            if link is not None:
                link.close()

    def _tell_end(self, link: Connection) -> None:
        """Says once why streams end: others that end for the same reason follow at once."""
        self._trouble = link.trouble or self._trouble
        level = logging.DEBUG if self._told == self._trouble and not link.ready else logging.WARNING
        _LOG.log(level, "the stream to the draft worker has ended: %s", self._trouble)
        self._told = self._trouble

    def _give_up(self, link: Connection) -> None:
        self._absence = "late" if link.alive else "dead"
        self._overdue = link.alive

    def _count_absence(self) -> None:
        """Counts why a round has no answer: once, though it was waited for twice."""
        if not self._counted:
            self.counters[self._absence] += 1
        self._counted = True

    @contextlib.contextmanager
    def _telling(self, link: Connection | None) -> Iterator[None]:
        """Where this is interrupted, nobody knows what the worker was told: a new stream, then."""
        try:
            yield
        except BaseException:
            if link is not None:
                link.close()
            raise

    def _send_round(
        self, link: Connection, moves: list[Move], lowered: np.ndarray, expand: Expand | None
    ) -> None:
        message = Round(
            number=next(self._numbers),
            moves=tuple(moves),
            lowered=lowered,
            expand=expand,
        )
        with self._telling(link):
            link.ask(message)
            self._moves = []

    def _flush(self) -> None:
        """Sends records that nobody expands: at the end of a text they have no branches."""
        if self._moves and self._link is not None:
            nothing = np.zeros((self.slots, self.k), np.int32)
            self._send_round(self._link, self._moves, nothing, None)

    def _take_q(self) -> None:
        """Puts the q that was asked for into the proposals; without it they stay point masses."""
        if not self._asked_q:
            return
        link, slots, self._asked_q = self._link, self._asked_q, []
        winner = None if link is None else link.winner(self._patience)
        if winner is None:
            self.counters["q late"] += len(slots)
            return
        for slot in slots:
            if not self._proposals.put_q(slot, winner):
                self.counters["q malformed"] += 1
