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

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ssd_jax.placement.process.proposals import HostProposals
from ssd_jax.roles.protocols import BranchingDraft
from ssd_jax.roles.records import Absence, BranchTokens, Promotion, SlotOpening
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.speculation.filled_pages import FilledPages
from ssd_jax.speculation.known_text import KnownText, promoted

PATIENCE = 1.0
"""Seconds that a round waits for the branches."""

_POLL, _LOOK = 5e-5, 5e-4  # seconds between looks: where a round waits, and before its outcome


class DispatchingDraft(BranchingDraft, Protocol):
    """A draft whose calls only dispatch, except `branch_tokens`."""

    def ready(self) -> bool:
        """Whether the branches of the last `expand` are ready: `branch_tokens` does not wait.

        Once true for an expansion, it stays true; `SubmeshDraft.promote` relies on this in a round
        without the draft.
        """
        ...


class SubmeshDraft:
    """See `protocols.BranchingDraft`; every call but `branch_tokens` only dispatches.

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
        self.patience = patience
        self.counters: Counter[str] = Counter()
        self._draft, self._send = draft, send
        self._texts: dict[int, KnownText] = {}
        self._openings: dict[int, SlotOpening] = {}
        self._filled = FilledPages(page_size)
        self._overdue = False  # the branches did not come within the limit
        self._serving = True  # the draft has this round's records
        self._awaited = False  # the draft is expanding them
        # Proposals of rounds without the draft.
        self._alone = HostProposals(draft.slots, draft.k, support, tokens)
        self._sent: Any = None  # this round's proposal on the target's devices

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.BranchingDraft.open`."""
        text = KnownText(most=opening.prompt)
        self._texts[opening.slot], self._openings[opening.slot] = text, opening
        self._filled.open(opening)
        self._draft.open(self._filled.known(opening))

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.BranchingDraft.set_pages`."""
        opening = self._openings[slot]
        self._filled.lose(pages[len(opening.pages) :])
        self._openings[slot] = dataclasses.replace(opening, pages=pages)
        self._draft.set_pages(slot, pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.BranchingDraft.prefill`."""
        self._texts[slot].prefill(tokens, offset)
        if self._usable():
            self._teach(slot)

    def promote(self, promotion: Promotion) -> None:
        """See `protocols.BranchingDraft.promote`."""
        self._serving, self._awaited, self._sent = self._usable(), False, None
        told = promoted(self._texts, promotion, self._teach if self._serving else None)
        if self._serving:
            self._draft.promote(told)
        else:
            self._alone.put(promotion.tokens, promotion.limit)

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        """See `protocols.BranchingDraft.draft`."""
        if not self._serving:
            return lambda: np.zeros(self.slots, np.int32)
        return self._draft.draft(limits, lowered=lowered)

    def confidence(self) -> np.ndarray:
        """See `protocols.BranchingDraft.confidence`: unknown, since reading it would wait."""
        return np.full((self.slots, self.k), UNKNOWN, np.int32)

    def tokens(self) -> Any:
        """See `protocols.BranchingDraft.tokens`, on the host or on the way to the target."""
        tokens = self._draft.tokens() if self._serving else self._alone.tokens
        return tokens if isinstance(tokens, np.ndarray) else self.proposal().tokens

    def proposal(self) -> Any:
        """See `protocols.BranchingDraft.proposal`: what is on the way; nothing is waited for."""
        if self._sent is None:
            self._sent = self._send(self._draft.proposal()) if self._serving else self._alone.now()
        return self._sent

    def expand(
        self,
        counts: np.ndarray,
        *,
        follow: np.ndarray,
        lowered: np.ndarray,
        forwards: int,
        skip: np.ndarray | None = None,
    ) -> None:
        """See `protocols.BranchingDraft.expand`."""
        if not self._serving:
            return
        self.proposal()  # on its way before the draft is busy
        self._draft.expand(counts, follow=follow, lowered=lowered, forwards=forwards, skip=skip)
        self._awaited = True
        for slot in np.flatnonzero(counts.any(axis=1)):
            self._texts[int(slot)].whole = True

    def branch_tokens(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """See `protocols.BranchingDraft.branch_tokens`; waits for all forwards: until
        `until` is true or, without it, for its patience."""
        if not self._awaited:
            self.counters["stale"] += 1
            return "stale"
        if until is not None:
            while not self._draft.ready():
                if until():
                    return None
                time.sleep(_LOOK)
        if self._come():
            return self._draft.branch_tokens(forwards)
        self._overdue = True
        self.counters["late"] += 1
        return "late"

    def _come(self) -> bool:
        """Waits for the branches; returns False if they do not come in time."""
        if self._draft.ready():
            return True
        self.counters["waited"] += 1
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            time.sleep(_POLL)
            if self._draft.ready():
                return True
        return False

    def _usable(self) -> bool:
        """Whether the draft's devices have finished what was expected of them."""
        self._overdue = self._overdue and not self._draft.ready()
        return not self._overdue

    def _teach(self, slot: int) -> None:
        """Gives the draft the tokens of a text that it lacks."""
        text = self._texts[slot]
        text.teach(lambda tokens, offset: self._draft.prefill(slot, tokens, offset))
        self._filled.taught(self._openings[slot], len(text.tokens))
