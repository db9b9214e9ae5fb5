"""Runs parts of a round on roles that are not in use yet, to time them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from ssd_jax.devices.target.programs import Programs
from ssd_jax.errors import SsdError
from ssd_jax.models.sharding import spans_processes
from ssd_jax.roles.protocols import BranchingDraft, Drafter, Pending, Target
from ssd_jax.roles.records import (
    IDLE,
    Drafted,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    SlotOpening,
    draft_batch,
    no_promotion,
    record_request,
)
from ssd_jax.sampling.params import SamplingParams

Clock = Callable[[], float]

PATIENCE = 60.0
"""Most seconds that a draft elsewhere may take for anything."""
MAX_PREFIX = 32
"""Most tokens before what is measured."""

_PAUSE = 0.01  # seconds between attempts
_JUST_IN_TIME = 2  # tokens
_GREEDY = SamplingParams()
_STRIDE = 7919  # ids between two tokens, whose embeddings are of different kinds


def seconds_of(run: Callable[[], Any], clock: Clock) -> float:
    """Seconds of a run behind one that is not timed.

    That one wakes threads, fills caches and waits for what others have left on the device.
    """
    run()
    start = clock()
    run()
    return clock() - start


def varied_tokens(
    ids: int, rows: int, count: int, *, first: int = 0
) -> Int32[np.ndarray, "rows count"]:
    """Tokens of texts that differ, out of a sequence in which none comes twice as long as ids
    suffice. Rows of one token would use the same experts, and so cost less than rows of texts.

    Args:
      ids: number of ids that exist.
      first: place in the sequence.
    """
    number = first + np.arange(rows * count, dtype=np.int64).reshape(rows, count)
    return (1 + number * _STRIDE % (ids - 1)).astype(np.int32)


def draft_run(
    drafter: Drafter, slots: int, context: int, params: SamplingParams = _GREEDY, *, ids: int
) -> Callable[[], None]:
    """A function that proposes K tokens in every slot, and waits; slots are empty before.

    Args:
      ids: number of ids that exist.
    """
    position = _position(context, drafter.k)
    _open(drafter, range(slots), params)
    texts = varied_tokens(ids, slots, position + 1)
    for slot in range(slots):
        drafter.prefill(slot, texts[slot, :position].tolist(), 0, last=True)
    batch = draft_batch(slots, drafter.k + 1)
    batch.pending[:], batch.position[:] = texts[:, position], position
    batch.tokens[:, 0], batch.counts[:] = texts[:, position], 1
    batch.limit[:] = batch.room[:] = drafter.k

    def propose() -> None:
        drafter.propose(batch)
        jax.block_until_ready(drafter.proposal())

    return propose


def varied_proposals(programs: Programs, slots: int, widths: Iterable[int]) -> dict[int, Any]:
    """Proposals of w tokens in every slot, by w, for `verify_run`; with trees, whole ones."""
    verification, model = programs.verification, programs.model
    blank = programs.blank_tree() if verification.nodes else verification.blank(slots)
    # Other processes must be sent host arrays.
    transfer = model.place if not spans_processes(model.mesh) else lambda proposal: proposal
    blank = blank._replace(tokens=varied_tokens(programs.ids, *blank.tokens.shape, first=slots))
    lengths = {width: np.full(slots, verification.nodes or width, np.int32) for width in widths}
    return {width: transfer(blank._replace(length=length)) for width, length in lengths.items()}


def verify_run(
    target: Target,
    proposals: Mapping[int, Any],
    params: SamplingParams = _GREEDY,
    *,
    ids: int,
    trees: bool = False,
) -> Callable[..., None]:
    """A function that verifies w tokens of every slot, or of the first `rows`, from dispatch until
    the outcome is read.

    Args:
      target: with empty slots.
      proposals: by w.
      ids: number of ids that exist.
      trees: whether they are trees, whose nodes then all follow the pending token.
    """
    _open(target, range(target.slots), params)
    tokens = varied_tokens(ids, target.slots, 1)[:, 0]
    position = _position(target.context, max(proposals))

    def run(width: int, rows: int = target.slots) -> None:
        lengths = np.where(np.arange(target.slots) < rows, position, IDLE).astype(np.int32)
        proposal = proposals[width] if width else None
        drafted = proposal and Drafted(
            np.full_like(tokens, width),
            proposal.tokens,
            parents=np.zeros(proposal.tokens.shape, np.int32) if trees else None,
        )
        target.accept(target.forward(tokens, lengths, drafted), proposal).read()

    return run


def ahead_run(target: Target, clock: Clock, *, ids: int) -> Callable[..., float]:
    """A function that runs so many rounds of mode ar in all slots, or in the first `rows`; it
    returns the seconds of one.

    Each round is dispatched before the last is read. The time begins with an idle target, before
    the first dispatch: a delay of the host can then only add to it. `ids` exist.
    """
    tokens = varied_tokens(ids, target.slots, 1)[:, 0]
    position = _position(target.context, 0)

    def run(count: int, rows: int = target.slots) -> float:
        lengths = np.where(np.arange(target.slots) < rows, position, IDLE).astype(np.int32)

        def dispatch(pending: Any) -> Pending:
            return target.accept(target.forward(pending, lengths))

        dispatch(tokens).read()
        start = clock()
        current = dispatch(tokens)
        for _ in range(count):
            following = dispatch(current.bonus)
            current.read()
            current = following
        seconds = clock() - start
        current.read()
        return seconds / count

    return run


class Branches:
    """Times the branches of mode ssd on a draft with empty slots, for the first slots together.

    For a draft in a worker, all times include the time to answer.

    Args:
      draft: a draft elsewhere must wait for answers as long as `PATIENCE`: the time of answers is
        what is measured, and a draft that is late each time would never be timed.
      context: most positions of a slot.
      ids: number of ids that exist.
      pages: pages of all slots, if they share a stock; their content does not matter.
      clock: seconds.

    Attributes:
      rows: number of slots; all at first.

    Raises:
      SsdError: a worker does not answer; likewise in the methods.
    """

    def __init__(
        self,
        draft: BranchingDraft,
        context: int,
        *,
        ids: int,
        pages: Sequence[int] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._draft, self._clock = draft, clock
        self._lowered = np.ones((draft.slots, draft.k), np.int32)
        position, slots = _position(context, 2 * draft.k), range(draft.slots)
        _open(draft, slots, pages=pages)
        texts = varied_tokens(ids, draft.slots, position + 1)
        self._pending = texts[:, position]
        for slot in slots:
            draft.prefill(slot, texts[slot].tolist(), 0)
        self.rows, self._position = draft.slots, position

    def just_in_time(self) -> float:
        """Seconds to draft a token just in time, until the proposal is ready."""
        num_tokens = min(self._draft.k, _JUST_IN_TIME)

        def draft() -> bool:
            drafts = np.zeros(self._draft.slots, np.int32)
            drafts[: self.rows] = num_tokens
            answer = self._draft.record(RecordRequest(self._begin(), drafts, self._lowered))
            lengths = answer.lengths()
            jax.block_until_ready(answer.proposal())
            return bool(lengths[: self.rows].all())

        return self._seconds(draft) / num_tokens

    def expansion(self, budget: int, concurrent: Callable[[], Any] = lambda: None) -> float:
        """Seconds of K forwards of M branches.

        Args:
          budget: M.
          concurrent: runs once they have begun; the clock stops when both have ended.
        """
        k, slots = self._draft.k, self._draft.slots
        counts, follow = np.zeros((slots, k + 1), np.int32), np.zeros(slots, bool)
        counts[: self.rows, 0] = budget

        def expand() -> bool:
            self._draft.record(record_request(self._begin()))
            answer = self._draft.expand(ExpansionRequest(counts, follow, self._lowered, k))
            concurrent()
            deadline = self._clock() + PATIENCE
            while not isinstance(branches := answer.branches(k), str):
                if branches is not None and branches.forwards >= k:
                    return True
                if self._clock() > deadline:
                    break
            return False

        return self._seconds(expand)

    def _begin(self) -> Promotion:
        """Records without tokens."""
        begin = no_promotion(self._draft.slots, self._draft.k, nodes=self._draft.nodes)
        begin.position[: self.rows] = self._position
        begin.pending[: self.rows] = self._pending[: self.rows]
        return begin

    def _seconds(self, attempt: Callable[[], bool]) -> float:
        """Seconds of an attempt; if a worker is late, as it may be at first, of all attempts."""

        def answer() -> None:
            deadline = self._clock() + PATIENCE
            while not attempt():
                if self._clock() > deadline:
                    raise SsdError(
                        f"the draft worker did not answer for {PATIENCE:.0f} s while its speed was "
                        "measured: see whether it has a core of its own, and is not one of more "
                        "workers than there are; with mode, k and budget given, nothing is measured"
                    )
                time.sleep(_PAUSE)

        return seconds_of(answer, self._clock)


def _open(
    role: Target | Drafter | BranchingDraft,
    slots: Iterable[int],
    params: SamplingParams = _GREEDY,
    pages: Sequence[int] = (),
) -> None:
    for slot in slots:
        role.open(SlotOpening(slot, params, slot, pages=tuple(pages)))


def _position(context: int, behind: int) -> int:
    """Position of the pending token, with room behind it."""
    return max(0, min(MAX_PREFIX, context - behind - 2))
