"""Roles of the leader, whose followers make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from typing_extensions import override

from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.roles.protocols import Drafter, Pending, PendingLogprobs, Target
from ssd_jax.roles.records import (
    DraftBatch,
    Drafted,
    Masks,
    Outcomes,
    ProposedTokens,
    SlotOpening,
    TopLogprobs,
)
from ssd_jax.wire.host_messages import Role

Read = TypeVar("Read", Outcomes, TopLogprobs)


class _MirroredResult(Generic[Read]):
    """The result of a call that all hosts have."""

    def __init__(self, leader: Leader, call: int, read: Callable[[], Read]) -> None:
        self._leader, self._call, self._read = leader, call, read

    def read(self) -> Read:
        """Waits for the result, as `Pending.read` and `PendingLogprobs.read` do."""
        return self._leader.read(self._call, self._read)


class MirroredPending(_MirroredResult[Outcomes]):
    """A `Pending` that all hosts have."""

    def __init__(self, leader: Leader, call: int, pending: Pending) -> None:
        super().__init__(leader, call, pending.read)
        self.bonus, self.ready = pending.bonus, pending.ready


class _Calls:
    """Calls of an engine's role, here and at all followers.

    Args:
      engine: number of the engine.
      role: its role, see `host_messages.CALLS`.
      local: the role of this process.
    """

    def __init__(self, leader: Leader, engine: int, role: Role, local: Any) -> None:
        self._leader, self._engine, self._local = leader, engine, local
        self._role: Role = role

    def __call__(self, method: str, *arguments: Any, make: Callable[[], Any] | None = None) -> Any:
        """Makes a call, and returns its result.

        Args:
          arguments: of the call at followers, and here without `make`.
          make: makes the call here.
        """
        make = make or partial(getattr(self._local, method), *arguments)
        return self.numbered(make, method, *arguments)[1]

    def numbered(self, make: Callable[[], Any], method: str, *arguments: Any) -> tuple[int, Any]:
        """Makes a call by `make`, at followers with `arguments`; returns its number and result."""
        return self._leader.call(make, self._engine, self._role, method, *arguments)


class MirroredDrafter(Drafter):
    """A draft on the target's devices.

    Args:
      leader, engine: the followers' engine of this number has such a drafter, too.
      drafter: the drafter of this process.
    """

    def __init__(self, leader: Leader, engine: int, drafter: Drafter) -> None:
        self.k, self.on_device, self.timed = drafter.k, drafter.on_device, drafter.timed
        self._drafter, self._call = drafter, _Calls(leader, engine, "drafter", drafter)

    @override
    def open(self, opening: SlotOpening) -> None:
        self._call("open", opening)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._call("set_pages", slot, list(pages))

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        make = partial(self._drafter.prefill, slot, tokens, offset, last=last)
        self._call("prefill", slot, list(tokens), offset, last, make=make)

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        return self._call("propose", list(batch), make=partial(self._drafter.propose, batch))

    @override
    def proposal(self) -> Any:
        return self._drafter.proposal()


class MirroredTarget:
    """A `Target` on the devices of all hosts.

    Args:
      leader, engine: the followers' engine of this number has such a target, too.
      target: the target of this process.
      drafter: the drafter that followers have, too, whose proposals are not sent; None for none.
    """

    def __init__(
        self, leader: Leader, engine: int, target: Target, drafter: MirroredDrafter | None
    ) -> None:
        self.slots, self.context, self.max_chunk = target.slots, target.context, target.max_chunk
        self._leader, self._engine, self._target = leader, engine, target
        self._call = _Calls(leader, engine, "target", target)
        self._has_mirrored_drafter = drafter is not None
        self._bonus: Any = None
        self._logits: Any = None

    def close(self) -> None:
        """Has followers give up the engine's roles, which are not called any more."""
        self._leader.call(lambda: None, self._engine, "engine", "end")

    def open(self, opening: SlotOpening) -> None:
        """Opens a slot, as `Target.open`."""
        self._call("open", opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot more pages, as `Target.set_pages`."""
        self._call("set_pages", slot, list(pages))

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Prefills tokens, as `Target.prefill`."""
        self._call("prefill", slot, list(tokens), offset)

    def prefill_last(
        self, slot: int, tokens: Sequence[int], offset: int, masks: Masks | None = None
    ) -> MirroredPending:
        """Prefills the last tokens, as `Target.prefill_last`."""
        make = partial(self._target.prefill_last, slot, tokens, offset, masks)
        arguments = slot, list(tokens), offset, masks
        return self._pending(*self._call.numbered(make, "prefill_last", *arguments))

    def score(self, slot: int, tokens: Sequence[int]) -> _MirroredResult[TopLogprobs]:
        """Scores tokens of a prompt, as `Target.score`."""
        make = partial(self._target.score, slot, tokens)
        pending: PendingLogprobs
        call, pending = self._call.numbered(make, "score", slot, list(tokens))
        return _MirroredResult(self._leader, call, pending.read)

    def forward(self, pending: Any, lengths: np.ndarray, drafted: Drafted | None = None) -> Any:
        """Runs rows, as `Target.forward`. Bonus tokens must be those of the last `accept`."""
        pending_tokens = pending if isinstance(pending, np.ndarray) else None
        if pending_tokens is None and pending is not self._bonus:
            raise ValueError("followers have the bonus tokens of the last accept alone")
        counts = tokens = parents = None
        if drafted is not None:
            counts = drafted.lengths
            if not self._has_mirrored_drafter:
                tokens = np.asarray(drafted.tokens)
                parents = None if drafted.parents is None else np.asarray(drafted.parents)
        make = partial(self._target.forward, pending, lengths, drafted)
        arguments = pending_tokens, lengths, counts, tokens, parents
        self._logits = self._call("forward", *arguments, make=make)
        return self._logits

    def read_tokens(self, drafted: Drafted) -> ProposedTokens:
        """Reads the tokens of the last `forward`, as `Target.read_tokens`."""
        if not self._has_mirrored_drafter:
            return self._target.read_tokens(drafted)
        return self._call("read_tokens", make=partial(self._target.read_tokens, drafted))

    def accept(
        self, logits: Any, proposal: Any = None, masks: Masks | None = None
    ) -> MirroredPending:
        """Verifies, as `Target.accept`. The logits must be those of the last `forward`."""
        if logits is not self._logits:
            raise ValueError("followers have the logits of the last forward alone")
        is_drafters, arrays = proposal is not None and self._has_mirrored_drafter, None
        if proposal is not None and not is_drafters:
            arrays = [np.asarray(array) for array in proposal]
        make = partial(self._target.accept, logits, proposal, masks)
        pending = self._pending(*self._call.numbered(make, "accept", arrays, is_drafters, masks))
        self._bonus = pending.bonus
        return pending

    def _pending(self, call: int, pending: Pending) -> MirroredPending:
        return MirroredPending(self._leader, call, pending)
