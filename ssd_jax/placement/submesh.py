"""The `submesh` placement: a draft on its own devices, in the target's process.

One thread dispatches the programs of both roles, and JAX runs them as their inputs arrive. The
look-up needs the tokens of the branches; they are copied to the host while the target verifies, and
a round that needs them earlier waits for them, up to a limit. After a hit the target's forward
takes the tokens from the host; their q goes from the draft's devices to the target's without
passing through the host, and `accept` waits for it. Branches that miss the limit are late: rows
take their backup, and nothing is dispatched to the draft's devices, nor expected of them, until
they have finished. Then every slot catches up on the tokens that the draft has missed. A draft that
hangs before its branches reach the host therefore costs only speed; one that hangs between then and
the copy of a proposal hangs the target too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from ssd_jax.placement.host_proposals import HostProposals, HostRecords
from ssd_jax.roles.handles import ProposalHandle, TokenArray
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
from ssd_jax.speculation.draft_texts import DraftTexts

PATIENCE = 1.0
"""Seconds that a round waits for the branches."""

_ROUND_POLL = 5e-5  # seconds between looks where a round waits
_OUTCOME_POLL = 5e-4  # the same before its outcome


class DispatchedBranches(ExpansionAnswer, Protocol):
    """Branches that were dispatched; only reading them waits."""

    def ready(self) -> bool:
        """Whether `branches` would not wait. Once true, it stays true."""
        ...


class DispatchingDraft(BranchingDraft, Protocol):
    """A draft whose calls only dispatch."""

    def expand(self, request: ExpansionRequest) -> DispatchedBranches:
        """Branches off every record, as `BranchingDraft.expand`."""
        ...


class SubmeshDraft(BranchingDraft):
    """A draft on other devices of this process.

    Args:
      draft: the draft, on its devices.
      send: moves arrays to the target's devices without waiting for them.
      support: number of ids that a proposal's q is kept for.
      tokens: number of ids that the tokenizer has.
      page_size: positions of a page; 0 where slots share none.
      patience: seconds to wait for the branches.

    Attributes:
      counters: rounds whose branches were not ready at the look-up ("waited"), those of them that
        went on without branches ("late"), and rounds that expected none ("stale").
    """

    def __init__(
        self,
        draft: DispatchingDraft,
        send: Callable[[Any], Any],
        *,
        support: int,
        tokens: int,
        page_size: int = 0,
        patience: float = PATIENCE,
    ) -> None:
        self.slots, self.k, self.branches = draft.slots, draft.k, draft.branches
        self.nodes = draft.nodes
        self.patience = patience
        self.counters: Counter[str] = Counter()
        self._draft, self._send = draft, send
        self._support, self._tokens = support, tokens
        self._texts = DraftTexts(page_size)
        self._records: SubmeshRecords | None = None  # of this round; None if the draft has none
        self._overdue: DispatchedBranches | None = None  # branches that did not come in time

    @override
    def open(self, opening: SlotOpening) -> None:
        self._texts.open(opening)
        self._draft.open(self._texts.reusable(opening.slot))

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._texts.set_pages(slot, pages)
        self._draft.set_pages(slot, pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._texts[slot].prefill(tokens, offset)
        if self._usable():
            self._teach(slot)

    @override
    def record(self, request: RecordRequest) -> RecordAnswer:
        usable = self._usable()
        promotion = self._texts.record(request.promotion, self._teach if usable else None)
        if not usable:
            self._records = None
            width = self.nodes or self.k
            proposals = HostProposals(self.slots, width, self._support, self._tokens)
            proposals.put(promotion.tokens, promotion.limit)
            return HostRecords(proposals, promotion.parents)
        answer = self._draft.record(request._replace(promotion=promotion))
        # On its way before the draft is busy with branches.
        sent = self._send((answer.proposal(), answer.parents()))
        self._records = SubmeshRecords(answer, *sent)
        return self._records

    @override
    def expand(self, request: ExpansionRequest) -> ExpansionAnswer:
        if self._records is None:
            return SubmeshBranches(self, None)
        self._texts.expand(np.flatnonzero(request.counts.any(axis=1)).tolist())
        return SubmeshBranches(self, self._draft.expand(request))

    @override
    def close(self) -> None:
        self._draft.close()

    def overdue(self, branches: DispatchedBranches) -> None:
        """Notes branches behind which nothing may be dispatched until they are ready."""
        self._overdue = branches

    def _usable(self) -> bool:
        """Whether the draft's devices have finished what was expected of them."""
        if self._overdue is not None and self._overdue.ready():
            self._overdue = None
        return self._overdue is None

    def _teach(self, slot: int) -> None:
        """Gives the draft the tokens of a text that it lacks."""
        self._texts.teach(slot, lambda tokens, offset: self._draft.prefill(slot, tokens, offset))


class SubmeshRecords(RecordAnswer):
    """Records on the draft's devices.

    Args:
      answer: of the draft.
      sent, parents: its proposal, on the way to the target's devices.
    """

    def __init__(
        self, answer: RecordAnswer, sent: ProposalHandle, parents: TokenArray | None
    ) -> None:
        self._answer, self._sent, self._parents = answer, sent, parents

    @override
    def lengths(self) -> Row:
        return self._answer.lengths()

    @override
    def tokens(self) -> TokenArray:
        return self._sent.tokens

    @override
    def parents(self) -> TokenArray | None:
        return self._parents

    @override
    def confidence(self) -> np.ndarray:
        """Unknown, since reading it would wait."""
        return np.full(self._sent.tokens.shape, UNKNOWN, np.int32)

    @override
    def proposal(self) -> ProposalHandle:
        """What is on the way; nothing is waited for."""
        return self._sent


class SubmeshBranches(ExpansionAnswer):
    """Branches on the draft's devices; None if none were asked for."""

    def __init__(self, draft: SubmeshDraft, branches: DispatchedBranches | None) -> None:
        self._draft, self._branches = draft, branches

    @override
    def branches(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Waits for all forwards: until `until` is true or, without it, for the patience."""
        draft, branches = self._draft, self._branches
        if branches is None:
            draft.counters["stale"] += 1
            return "stale"
        if until is not None:
            while not branches.ready():
                if until():
                    return None
                time.sleep(_OUTCOME_POLL)
        if self._wait_ready(branches):
            return branches.branches(forwards)
        draft.overdue(branches)
        draft.counters["late"] += 1
        return "late"

    def _wait_ready(self, branches: DispatchedBranches) -> bool:
        """Waits for the branches; returns False if they do not come in time."""
        if branches.ready():
            return True
        self._draft.counters["waited"] += 1
        end = time.monotonic() + self._draft.patience
        while time.monotonic() < end:
            time.sleep(_ROUND_POLL)
            if branches.ready():
                return True
        return False
