"""The engine's side of a draft in a worker: `roles.BranchingDraft` over a stream.

Each round waits for the answer to the one before it, up to a limit. While an answer is overdue
nothing else is sent; when it has come, every slot catches up by a `Prefill` of the tokens that the
worker has missed. A worker that is late or dead therefore costs only speed, and messages to a
stopped worker never pile up.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from typing_extensions import override

from ssd_jax.placement.host_proposals import HostProposals, HostRecords
from ssd_jax.placement.process.connection import Connection, OwnedBranches
from ssd_jax.placement.process.slot_messages import SlotMessages
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import (
    Absence,
    BranchTokens,
    ExpansionRequest,
    RecordRequest,
    Row,
    SlotOpening,
)
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.sequence_state import within_depth
from ssd_jax.wire.draft_spec import DraftSpec
from ssd_jax.wire.messages import ExpandMessage, RecordMessage

PATIENCE = 1.0
"""Seconds that a round waits for an answer."""
LEAVES = 1e-3
"""Seconds that the target's forward waits until a message has left."""


class RemoteDraft(BranchingDraft):
    """A draft in a worker.

    Args:
      spec: what the worker must be.
      streams: the streams to it.
      greedy: whether the draft proposes its likeliest tokens however the request samples.
      patience: seconds to wait for an answer.
    """

    def __init__(
        self,
        spec: DraftSpec,
        streams: WorkerStreams,
        *,
        greedy: bool = False,
        patience: float = PATIENCE,
    ) -> None:
        self.slots, self.k, self.branches = spec.slots, spec.k, spec.branches
        self.nodes = spec.nodes
        self.streams, self.patience = streams, patience
        self._spec = spec
        self._ships_q = RULES[spec.rule].ships_q and not greedy
        self._sampled = np.zeros(spec.slots, bool)  # slots whose verification needs q
        self._messages = SlotMessages(spec)
        self._records: RemoteRecords | None = None  # of this round; None if the worker has none

    @property
    def epochs(self) -> np.ndarray:
        """Epochs of the slots' requests [B]."""
        return self._messages.epochs

    @property
    def page_size(self) -> int:
        """Positions of a page; 0 where slots share none."""
        return self._spec.page_size

    @property
    def counters(self) -> Counter[str]:
        """Counts of events: those of the streams, "q late" and "q malformed"."""
        return self.streams.counters

    @override
    def open(self, opening: SlotOpening) -> None:
        self._sampled[opening.slot] = self._ships_q and opening.params.temperature > 0
        self._messages.open(opening)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._messages.set_pages(slot, pages)

    def lose(self, pages: Sequence[int]) -> None:
        """These pages went to a slot of another worker, which writes another text to them."""
        self._messages.texts.lose(pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._messages.texts[slot].prefill(tokens, offset)
        link = self.streams.usable()
        if link is not None:
            with _close_if_interrupted(link):
                self._messages.send_text(slot, link)

    @override
    def record(self, request: RecordRequest) -> RemoteRecords | HostRecords:
        link = self.streams.usable()
        self.streams.new_round()
        width = self.nodes or self.k
        proposals = HostProposals(self.slots, width, self._spec.support, self._spec.tokens)
        proposals.put(request.promotion.tokens, request.promotion.limit)
        if link is None:
            self._records = None
            self._messages.texts.record(request.promotion, None)
            return HostRecords(proposals, request.promotion.parents)
        with _close_if_interrupted(link):
            promotion = self._messages.promotion(request.promotion, link)
            fields = promotion._asdict()
            if not self.nodes:
                empty = np.empty((self.slots, 0), np.int32)
                fields |= {"node": np.zeros(self.slots, np.int32), "parents": empty}
            message = RecordMessage(
                number=self._messages.new_number(),
                epochs=self.epochs.copy(),
                **fields,
                drafts=request.drafts,
                lowered=request.lowered,
                sampled=self._sampled,
            )
            link.ask_records(message)
        asked_q = self._sampled & (promotion.winner >= 0) & (promotion.limit > 0)
        self._records = RemoteRecords(
            self, link, message, proposals, np.flatnonzero(asked_q), self._sampled.copy()
        )
        return self._records

    @override
    def expand(self, request: ExpansionRequest) -> ExpansionAnswer:
        records = self._records
        if records is None or not records.in_time:
            return RemoteBranches(self, None)
        message, link = records.message, records.link
        counts = request.counts
        skip = np.zeros_like(counts) if request.skip is None else request.skip
        with _close_if_interrupted(link):
            link.ask_branches(
                ExpandMessage(
                    number=self._messages.new_number(),
                    epochs=message.epochs,
                    counts=counts,
                    skip=skip,
                    follow=(message.winner < 0) & (message.limit > 0),  # lost branches included
                    lowered=request.lowered,
                    forwards=request.forwards,
                    part=request.share.number,
                    parts=request.share.parts,
                )
            )
        link.stream.flush(LEAVES)
        # A slot near the end of its text has no branches.
        self._messages.texts.expand(np.flatnonzero(counts.any(axis=1)).tolist())
        return RemoteBranches(self, link)

    def activity(self) -> Activity:
        """What the worker has reported of its work since the last call."""
        link = self.streams.current
        return Activity() if link is None else link.activity(self.epochs)

    @override
    def close(self) -> None:
        """Ends the stream; the worker then frees the slots."""
        self.streams.close()


class RemoteRecords(RecordAnswer):
    """Records that a worker was asked for.

    Args:
      draft: whose records they are.
      link: the stream to the worker.
      message: as it was sent.
      proposals: point masses until their q comes.
      asked_q: slots whose q is to come.
      sampled: slots [B] whose verification needs q.
    """

    def __init__(
        self,
        draft: RemoteDraft,
        link: Connection,
        message: RecordMessage,
        proposals: HostProposals,
        asked_q: np.ndarray,
        sampled: np.ndarray,
    ) -> None:
        self._draft, self.link, self.message = draft, link, message
        self._proposals, self._asked_q, self._sampled = proposals, asked_q, sampled
        self.in_time = True
        """Whether the worker has answered everything in time so far."""
        self._drafted: Row | None = None
        self._confidence = np.full(proposals.tokens.shape, UNKNOWN, np.int32)
        self._parents = message.parents if draft.nodes else None

    @override
    def lengths(self) -> Row:
        if self._drafted is None:
            self._drafted = self._take_drafted()
        return self._drafted

    def _take_drafted(self) -> Row:
        """Waits for the tokens that the worker drafts just in time."""
        draft, limits = self._draft, self.message.drafts
        drafted = np.zeros(len(limits), np.int32)
        if not limits.any():
            return drafted
        answer = self.link.record_tokens(draft.patience)
        if answer is None:
            draft.streams.give_up(self.link)
            draft.streams.count_absence()
            self.in_time = False
            return drafted
        current = (limits[answer.slots] > 0) & (answer.epochs == draft.epochs[answer.slots])
        slots, proposals = answer.slots[current], self._proposals
        tokens, counts = proposals.tokens.copy(), proposals.lengths.copy()
        tokens[slots], counts[limits > 0] = answer.tokens[current], 0
        if self._parents is None:
            drafted[slots] = counts[slots] = np.minimum(answer.lengths[current], limits[slots])
        else:
            self._parents = self._parents.copy()
            self._parents[slots] = answer.parents[current]
            for slot, nodes in zip(slots.tolist(), answer.lengths[current].tolist(), strict=True):
                tree = self._parents[slot, :nodes].tolist()
                counts[slot], drafted[slot] = within_depth(tree, int(limits[slot]))
        proposals.put(tokens, counts)
        self._confidence[slots] = answer.confidence[current]
        self._asked_q = np.union1d(self._asked_q, slots[self._sampled[slots]])
        self._take_q()
        return drafted

    @override
    def tokens(self) -> np.ndarray:
        return self._proposals.tokens

    @override
    def parents(self) -> np.ndarray | None:
        return self._parents

    @override
    def confidence(self) -> np.ndarray:
        return self._confidence

    @override
    def proposal(self) -> Proposal:
        """Point masses where q did not come in time."""
        self._take_q()
        return self._proposals.proposal()

    def _take_q(self) -> None:
        """Puts the requested q into the proposals; without it they stay point masses."""
        slots, self._asked_q = self._asked_q, self._asked_q[:0]
        if not slots.size:
            return
        draft = self._draft
        answer = self.link.record_tokens(draft.patience) if self.in_time else None
        if answer is None:
            draft.counters["q late"] += len(slots)
        elif malformed := self._proposals.put_q(slots, answer):
            draft.counters["q malformed"] += malformed


class RemoteBranches(ExpansionAnswer):
    """Branches that a worker was asked for.

    Args:
      draft: whose branches they are.
      link: the stream to the worker; None if it was not asked.
    """

    def __init__(self, draft: RemoteDraft, link: Connection | None) -> None:
        self._draft, self._link = draft, link
        self._latest: OwnedBranches | None = None
        self._epochs = draft.epochs.copy()  # of the requests that `_branches` belong to
        self._branches: BranchTokens | None = None

    @override
    def branches(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Without `until` it waits no longer than the draft's patience."""
        draft, link, latest = self._draft, self._link, None
        if link is not None:
            patience = 0.0 if draft.streams.overdue else draft.patience  # it was waited for
            latest = link.branches(forwards, patience, until)
            if latest is None and until is not None and link.alive:
                return None
            if latest is None:
                draft.streams.give_up(link)
        if latest is None:
            draft.streams.count_absence()
            return draft.streams.absence
        is_current = latest is self._latest and (draft.epochs == self._epochs).all()
        if self._branches is None or not is_current:
            self._latest, self._epochs = latest, draft.epochs.copy()
            self._branches = latest.for_epochs(draft.epochs)
        return self._branches


@contextlib.contextmanager
def _close_if_interrupted(link: Connection) -> Iterator[None]:
    """Ends the stream if its block is interrupted: what the worker knows is then unknown."""
    try:
        yield
    except BaseException:
        link.close()
        raise
