"""Roles of the leader, whose followers make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.roles.protocols import Drafter, Pending, PendingLogprobs, Target
from ssd_jax.roles.records import DraftBatch, Drafted, Outcomes, SlotOpening, TopLogprobs
from ssd_jax.wire.host_messages import (
    Accept,
    EndEngine,
    Forward,
    OpenSlot,
    PrefillChunk,
    Propose,
    Score,
    SetPages,
)


class MirroredPending:
    """Outcomes that all hosts have; see `protocols.Pending`."""

    def __init__(self, leader: Leader, call: int, pending: Pending) -> None:
        self.bonus = pending.bonus
        self._leader, self._call, self._pending = leader, call, pending

    def ready(self) -> bool:
        """See `protocols.Pending.ready`."""
        return self._pending.ready()

    def read(self) -> Outcomes:
        """See `protocols.Pending.read`."""
        return self._leader.read(self._call, self._pending.read)


class MirroredLogprobs:
    """A prompt's log-probabilities that all hosts have; see `protocols.PendingLogprobs`."""

    def __init__(self, leader: Leader, call: int, pending: PendingLogprobs) -> None:
        self._leader, self._call, self._pending = leader, call, pending

    def read(self) -> TopLogprobs:
        """See `protocols.PendingLogprobs.read`."""
        return self._leader.read(self._call, self._pending.read)


class MirroredDrafter(Drafter):
    """A draft on the target's devices; see `protocols.Drafter`.

    Args:
      leader, engine: the followers' engine of this number has such a drafter, too.
      drafter: the drafter of this process.
    """

    def __init__(self, leader: Leader, engine: int, drafter: Drafter) -> None:
        self.k, self.on_device, self.timed = drafter.k, drafter.on_device, drafter.timed
        self._leader, self._engine, self._drafter = leader, engine, drafter

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Drafter.open`."""
        make = partial(self._drafter.open, opening)
        self._leader.call(make, OpenSlot, self._engine, "drafter", opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.Drafter.set_pages`."""
        make = partial(self._drafter.set_pages, slot, pages)
        self._leader.call(make, SetPages, self._engine, "drafter", slot, list(pages))

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `protocols.Drafter.prefill`."""
        make = partial(self._drafter.prefill, slot, tokens, offset, last=last)
        about = "drafter", slot, list(tokens), offset, last
        self._leader.call(make, PrefillChunk, self._engine, *about)

    def propose(self, batch: DraftBatch) -> Drafted:
        """See `protocols.Drafter.propose`."""
        make = partial(self._drafter.propose, batch)
        return self._leader.call(make, Propose, self._engine, list(batch))[1]

    def proposal(self) -> Any:
        """See `protocols.Drafter.proposal`."""
        return self._drafter.proposal()


class MirroredTarget:
    """See `protocols.Target`.

    Args:
      leader, engine: the followers' engine of this number has such a target, too.
      target: the target of this process.
      own: the drafter's proposal, if followers have their own; else None.
    """

    def __init__(
        self, leader: Leader, engine: int, target: Target, own: Callable[[], Any] | None
    ) -> None:
        self.slots, self.context, self.max_chunk = target.slots, target.context, target.max_chunk
        self._leader, self._engine, self._target, self._own = leader, engine, target, own
        self._bonus: Any = None
        self._accepted: tuple[Any, MirroredPending] | None = None  # with its logits

    def close(self) -> None:
        """Has followers release the engine's roles, which are not called any more."""
        self._leader.call(lambda: None, EndEngine, self._engine)

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Target.open`."""
        make = partial(self._target.open, opening)
        self._leader.call(make, OpenSlot, self._engine, "target", opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.Target.set_pages`."""
        make = partial(self._target.set_pages, slot, pages)
        self._leader.call(make, SetPages, self._engine, "target", slot, list(pages))

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.Target.prefill`."""
        make = partial(self._target.prefill, slot, tokens, offset)
        about = "target", slot, list(tokens), offset, False
        self._leader.call(make, PrefillChunk, self._engine, *about)

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> MirroredPending:
        """See `protocols.Target.prefill_last`."""
        make = partial(self._target.prefill_last, slot, tokens, offset)
        about = "target", slot, list(tokens), offset, True
        call, pending = self._leader.call(make, PrefillChunk, self._engine, *about)
        return MirroredPending(self._leader, call, pending)

    def score(self, slot: int, tokens: Sequence[int]) -> MirroredLogprobs:
        """See `protocols.Target.score`."""
        make = partial(self._target.score, slot, tokens)
        call, pending = self._leader.call(make, Score, self._engine, slot, list(tokens))
        return MirroredLogprobs(self._leader, call, pending)

    def forward(self, pending: Any, lengths: np.ndarray, drafted: Drafted | None = None) -> Any:
        """See `protocols.Target.forward`."""
        told = None
        if isinstance(pending, np.ndarray):
            told = pending
        elif pending is not self._bonus:
            raise ValueError("followers have the bonus tokens of the last accept alone")
        proposed, tokens = None, None
        if drafted is not None:
            proposed = drafted.lengths
            tokens = None if self._own else np.asarray(drafted.tokens)
        accepts = tokens is None  # what is verified is known, and needs no separate message

        def make() -> tuple[Any, Pending | None]:
            logits = self._target.forward(pending, lengths, drafted)
            own = None if drafted is None or self._own is None else self._own()
            return logits, self._target.accept(logits, own) if accepts else None

        about = lengths, told, proposed, tokens, accepts
        call, (logits, outcome) = self._leader.call(make, Forward, self._engine, *about)
        self._accepted = None if outcome is None else (logits, self._pending(call, outcome))
        return logits

    def accept(self, logits: Any, proposal: Any = None) -> MirroredPending:
        """See `protocols.Target.accept`."""
        if self._accepted is not None and self._accepted[0] is logits:
            return self._accepted[1]
        told = [np.asarray(array) for array in proposal]
        make = partial(self._target.accept, logits, proposal)
        return self._pending(*self._leader.call(make, Accept, self._engine, told))

    def _pending(self, call: int, pending: Pending) -> MirroredPending:
        self._bonus = pending.bonus
        return MirroredPending(self._leader, call, pending)
