"""The engine's side of a draft in a worker: `roles.BranchingDraft` over a stream.

Each round waits for the answer to the one before it, up to a limit. While an answer is overdue
nothing else is sent; when it has come, every slot catches up by a `Prefill` of the tokens that the
worker has missed. A worker that is late or dead therefore costs only speed, and messages to a
stopped worker never pile up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ssd_jax.placement.process.connection import Connection, Told
from ssd_jax.placement.process.due import Due
from ssd_jax.placement.process.proposals import HostProposals
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.records import (
    IDLE,
    Absence,
    BranchTokens,
    Promotion,
    SlotOpening,
    no_branches,
    promotion,
)
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.speculation.filled_pages import FilledPages
from ssd_jax.speculation.known_text import KnownText, promoted
from ssd_jax.wire.messages import (
    Hello,
    MorePages,
    Open,
    Prefill,
    Round,
)

PATIENCE = 1.0
"""Seconds that a round waits for an answer."""
LEAVES = 1e-3
"""Seconds that the target's forward waits until a message has left."""


class RemoteDraft:
    """See `roles.BranchingDraft`; only `draft`, `branch_tokens` and `proposal` wait for answers.

    Args:
      hello: what the worker must be.
      streams: the streams to it.
      greedy: whether the draft proposes its likeliest tokens however the request samples.
      patience: seconds to wait for an answer.

    Attributes:
      counters: counts of events: those of the streams, "q late" and "q malformed".
    """

    def __init__(
        self,
        hello: Hello,
        streams: WorkerStreams,
        *,
        greedy: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self.slots, self.k, self.branches = hello.slots, hello.k, hello.branches
        self.page_size = hello.page_size
        self.streams, self.counters = streams, streams.counters
        self._patience = patience
        self._q_travels = hello.rule == "ratio" and not greedy
        self._numbers, self._requests = itertools.count(1), itertools.count(1)
        self._epochs = np.zeros(hello.slots, np.int32)
        self._sampled = np.zeros(hello.slots, bool)  # slots whose verification needs q
        self._openings: dict[int, SlotOpening] = {}
        self._grown: set[int] = set()  # slots with pages that the worker was not told of
        self._texts: dict[int, KnownText] = {}
        self._taught: dict[int, Connection] = {}  # stream that a text's `known` refers to
        self._filled = FilledPages(hello.page_size)
        self._filled_by: Connection | None = None
        self._link: Connection | None = None  # that this round's records go to
        self._promotion: Promotion | None = None  # not settled yet
        self._records = promotion(self.slots, self.k)  # as the worker is told
        self._owners = self._epochs  # epochs of the records
        self._unsent = False
        self._asked_q = np.zeros(0, np.int64)
        self._awaited = False  # whether branches of the last `expand` are to come
        self._due = Due()
        self._told: Told | None = None
        self._branches = no_branches(self.slots, self.branches, self.k)
        self._proposals = HostProposals(hello.slots, hello.k, hello.support, hello.tokens)
        self._confidence = np.full((hello.slots, hello.k), UNKNOWN, np.int32)

    def open(self, opening: SlotOpening) -> None:
        """See `roles.BranchingDraft.open`."""
        slot = opening.slot
        self._settle()
        self._epochs[slot] = next(self._requests)
        self._sampled[slot] = self._q_travels and opening.params.temperature > 0
        self._openings[slot], self._texts[slot] = opening, KnownText(most=opening.prompt)
        self._grown.discard(slot)
        self._filled.open(opening)
        self._taught.pop(slot, None)
        self._told = None  # the slot's branches belong to another request

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `roles.BranchingDraft.set_pages`."""
        self._settle()
        opening = self._openings[slot]
        self._filled.lose(pages[len(opening.pages) :])
        self._openings[slot] = dataclasses.replace(opening, pages=pages)
        self._grown.add(slot)

    def lose(self, pages: Sequence[int]) -> None:
        """See `parallel.part.Part.lose`."""
        self._filled.lose(pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `roles.BranchingDraft.prefill`."""
        self._settle()
        self._texts[slot].prefill(tokens, offset)
        link = self.streams.usable()
        if link is not None:
            with self._telling(link):
                self._teach(slot, link)

    def promote(self, promotion: Promotion) -> None:
        """See `roles.BranchingDraft.promote`. Computes at once only what the target waits for."""
        self._flush()
        self._due.outcome()
        self._link = self.streams.usable()
        self.streams.new_round()
        self._asked_q = self._asked_q[:0]
        tokens = promotion.tokens.copy()
        for slot, winner in enumerate(promotion.winner.tolist()):
            if winner >= 0:
                tokens[slot] = self._branches.tokens[slot, winner]
        self._proposals.put(tokens, promotion.limit)
        self._promotion = promotion._replace(tokens=tokens)

    def _settle(self) -> None:
        """Computes what the worker is to be told about the records."""
        asked, link = self._promotion, self._link
        if asked is None:
            return
        slots = np.flatnonzero(asked.position != IDLE).tolist()
        anew = [slot for slot in slots if self._taught.get(slot) is not link]
        for slot in anew:
            self._texts[slot].whole = False
        # A branch is lost with its stream, or by an interrupted step.
        gone = [slot for slot in slots if self._texts[slot].known == asked.position[slot]]
        with self._telling(link):
            if link is not None:
                self._tell_pages(set(slots) - set(anew), link)
            teach = None if link is None else lambda slot: self._teach(slot, link)
            found = promoted(self._texts, asked, teach)
        if link is not None:
            winner = asked.winner.copy()
            for slot in anew + gone:
                winner[slot] = -1
            self._records = found._replace(winner=winner)
            self._owners, self._unsent = self._epochs.copy(), True
            if self._sampled.any():
                self._asked_q = np.flatnonzero(self._sampled & (winner >= 0) & (asked.limit > 0))
        self._confidence[:] = UNKNOWN
        self._promotion = None

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        """See `roles.BranchingDraft.draft`."""
        self._settle()
        if self._link is not None:
            self._send_round(self._link, lowered, drafts=limits)
        return functools.partial(self._take_drafted, self._link, limits)

    def _take_drafted(self, link: Connection | None, limits: np.ndarray) -> np.ndarray:
        """Waits for the tokens that a worker drafts just in time."""
        drafted = np.zeros(self.slots, np.int32)
        if link is None:
            return drafted
        winner = link.winner(self._patience)
        if winner is None:
            self.streams.give_up(link)
            self.streams.count_absence()
            self._link = None
            return drafted
        ours = (limits[winner.slots] > 0) & (winner.epochs == self._epochs[winner.slots])
        slots = winner.slots[ours]
        drafted[slots] = np.minimum(winner.lengths[ours], limits[slots])
        tokens = self._proposals.tokens.copy()
        tokens[slots] = winner.tokens[ours]
        self._proposals.put(tokens, np.where(limits > 0, drafted, self._proposals.lengths))
        self._confidence[slots] = winner.confidence[ours]
        self._asked_q = np.union1d(self._asked_q, slots[self._sampled[slots]])
        self._take_q()
        return drafted

    def tokens(self) -> np.ndarray:
        """See `roles.BranchingDraft.tokens`: known on the host."""
        return self._proposals.tokens

    def confidence(self) -> np.ndarray:
        """See `roles.BranchingDraft.confidence`: known since the tokens were drafted."""
        return self._confidence

    def proposal(self) -> Any:
        """See `roles.BranchingDraft.proposal`: point masses where q did not come in time."""
        self._flush()
        self._take_q()
        return self._proposals.now()

    def expand(
        self,
        counts: np.ndarray,
        *,
        follow: np.ndarray,
        lowered: np.ndarray,
        forwards: int,
        skip: np.ndarray | None = None,
    ) -> None:
        """See `roles.BranchingDraft.expand`."""
        link = self._link
        self._settle()
        self._awaited = link is not None
        if link is None:
            return
        given = (self._records.winner < 0) & (self._records.limit > 0)  # lost branches included
        due = self._due.expected()
        asked = {"counts": counts, "follow": given, "forwards": forwards, "due": due}
        self._send_round(link, lowered, **asked | ({} if skip is None else {"skip": skip}))
        link.stream.flush(LEAVES)
        for slot in np.flatnonzero(counts.any(axis=1)).tolist():
            self._texts[slot].whole = True  # a slot near the end of its text has no branches

    def branch_tokens(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """See `roles.BranchingDraft.branch_tokens`; without `until` no longer than its patience.

        Returns: the same object as before if nothing has come since.
        """
        link, told = self._link, None
        if self._awaited and link is not None:
            patience = 0.0 if self.streams.overdue else self._patience  # it was waited for
            told = link.told(forwards, patience, until)
            if told is None and until is not None and link.alive:
                self._due.outcome()
                return None
            if told is None:
                self.streams.give_up(link)
        if told is None:
            self.streams.count_absence()
            return self.streams.absence
        if told is not self._told:
            self._told, self._branches = told, told.of(self._epochs)
        return self._branches

    def activity(self) -> Activity:
        """What the worker has reported of its work since the last call."""
        link = self.streams.current
        return Activity() if link is None else link.activity(self._epochs)

    def close(self) -> None:
        """Ends the stream; the worker then frees the slots."""
        self.streams.close()

    @contextlib.contextmanager
    def _telling(self, link: Connection | None) -> Iterator[None]:
        """Ends the stream if its block is interrupted: what the worker was told is then unknown."""
        try:
            yield
        except BaseException:
            if link is not None:
                link.close()
            raise

    def _teach(self, slot: int, link: Connection) -> None:
        """Sends a worker the tokens of a slot's text that it lacks; all of them if it is new."""
        text, epoch = self._texts[slot], int(self._epochs[slot])
        opening = self._openings[slot]
        if self._filled_by is not link:
            self._filled_by = link
            self._filled.forget()
        if self._taught.get(slot) is not link:
            self._taught[slot] = link
            text.forget()
            known = self._filled.known(opening)
            link.send(Open(number=next(self._numbers), epoch=epoch, opening=known))
            self._grown.discard(slot)
        text.teach(
            lambda tokens, offset: link.send(
                Prefill(
                    number=next(self._numbers),
                    slot=slot,
                    epoch=epoch,
                    offset=offset,
                    tokens=np.array(tokens, np.int32),
                )
            )
        )
        self._filled.taught(opening, len(text.tokens))

    def _tell_pages(self, slots: set[int], link: Connection) -> None:
        """Tells a worker which pages slots have got since it was last told."""
        for slot in self._grown & slots:
            epoch, pages = int(self._epochs[slot]), tuple(self._openings[slot].pages)
            number = next(self._numbers)
            link.send(MorePages(number=number, slot=slot, epoch=epoch, pages=pages))
        self._grown -= slots

    def _send_round(
        self, link: Connection, lowered: np.ndarray | None = None, **asked: Any
    ) -> None:
        """Sends some fields of a `Round`, with the records that were not sent yet."""
        nothing = np.zeros((self.slots, self.k + 1), np.int32)
        none = {"counts": nothing, "skip": nothing, "forwards": 0}
        none |= dict.fromkeys(("drafts", "follow"), nothing[:, 0])
        records = self._records if self._unsent else promotion(self.slots, self.k)
        message = Round(
            number=next(self._numbers),
            epochs=self._owners,
            sampled=self._sampled,
            lowered=nothing[:, 1:] if lowered is None else lowered,
            **records._asdict(),
            **none | asked,
        )
        with self._telling(link):
            link.ask(message)
            self._unsent = False

    def _flush(self) -> None:
        """Sends records that are not expanded, since they have no branches at the end of a text."""
        self._settle()
        if self._unsent and self._link is not None:
            self._send_round(self._link)

    def _take_q(self) -> None:
        """Puts the requested q into the proposals; without it they stay point masses."""
        slots, self._asked_q = self._asked_q, self._asked_q[:0]
        if not slots.size:
            return
        winner = None if self._link is None else self._link.winner(self._patience)
        if winner is None:
            self.counters["q late"] += len(slots)
        elif malformed := self._proposals.put_q(slots, winner):
            self.counters["q malformed"] += malformed
