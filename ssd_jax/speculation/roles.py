"""What the engine asks of its two roles: pure host types, so that tests can give it fakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.activity import Activity
from ssd_jax.speculation.cache import BranchTokens, CacheLookup

Array = Any
"""A NumPy array on the host, or a JAX array on its way."""

IDLE = -1
"""Length of a slot that a batched forward must leave alone."""


@dataclasses.dataclass(frozen=True)
class SlotOpening:
    """A new request in a slot, as the roles are told of it.

    Attributes:
      params: how it is sampled.
      index: of the request; with `params.seed` it names its noise.
      banned: ids that are impossible at positions below `ban_before`.
    """

    slot: int
    params: SamplingParams
    index: int = 0
    banned: Sequence[int] = ()
    ban_before: int = 0


class TopLogprobs(NamedTuple):
    """Log-probabilities of W emitted tokens a row.

    Attributes:
      chosen: [B, W] float32, of the tokens themselves.
      ids, values: [B, W, n] int32 and float32, the likeliest tokens, descending.
    """

    chosen: np.ndarray
    ids: np.ndarray
    values: np.ndarray


class Outcomes(NamedTuple):
    """The verification outcomes (k, t*) of a round.

    Attributes:
      accepted: [B] int32, k.
      tokens: [B, W] int32; the first k + 1 are emitted: accepted ones, then the bonus token.
      logprobs: of `tokens`, where the target was told to report them.
    """

    accepted: np.ndarray
    tokens: np.ndarray
    logprobs: TopLogprobs | None = None


class Pending(Protocol):
    """The outcomes of a dispatched program."""

    def read(self) -> Outcomes:
        """Waits for them."""
        ...

    def ready(self) -> bool:
        """Whether `read` waits for nothing."""
        ...


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Proposed tokens of a round, perhaps still being computed; their q comes with
    `Drafter.proposal`.

    Attributes:
      lengths: [B] int32, L of each slot, known at once.
      tokens: [B, K] int32, for the target's forward.
      sources: by slot, where a speculation cache was looked up: "hit", or why there was none.
      lookup: of the cache.
      activity: of a draft with devices of its own, since the last proposal.
    """

    lengths: np.ndarray
    tokens: Any
    sources: Mapping[int, str] = dataclasses.field(default_factory=dict)
    lookup: CacheLookup | None = None
    activity: Activity | None = None


class DraftBatch(NamedTuple):
    """What a drafter needs to know before it proposes; rows that get no proposal are idle.

    Attributes:
      position: [B] int32, absolute position of the pending token; `IDLE` leaves a row alone.
      tokens: [B, W] int32, what the row's last round has committed, the pending token last.
      counts: [B] int32, how many of them there are. What a `propose` that failed was given comes
        again, at the same position.
      limit: [B] int32, most tokens to propose, at least 1; 0 in idle rows.
      room: [B] int32, tokens that may still be committed.
    """

    position: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    limit: np.ndarray
    room: np.ndarray

    @property
    def slots(self) -> list[int]:
        """Rows that are not idle."""
        return np.flatnonzero(self.limit).tolist()


def draft_batch(slots: int, width: int) -> DraftBatch:
    """Idle rows, to be filled in; `width` is the most tokens that a round commits."""
    none = np.zeros(slots, np.int32)
    tokens = np.full((slots, width), -1, np.int32)
    return DraftBatch(np.full(slots, IDLE, np.int32), tokens, none, none.copy(), none.copy())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """What a drafter is, declared.

    Attributes:
      conditioned_on: what its proposals are made from: the "tokens" so far.
      proposes: "distribution" (q is known) or "point_mass" (tokens without a q).
      on_device: whether it keeps the devices busy that it shares with the target.
      timed: whether lengths of its proposals depend on time, or on other requests, where sampled
        texts depend on them: under the ratio rule. See `occurrences`.
    """

    conditioned_on: str = "tokens"
    proposes: str
    on_device: bool
    timed: bool = False


class Drafter(Protocol):
    """The draft role: proposes tokens for the target to verify.

    Attributes:
      k: most tokens of a proposal.
    """

    traits: Traits
    k: int

    def open(self, opening: SlotOpening) -> None:
        """Empties a slot for a new request."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """Takes prompt tokens, at most the target's `max_chunk` at a time."""
        ...

    def gather(self, until: Callable[[], bool]) -> None:
        """Takes what was speculated, before the outcome is read; waits for it no longer than
        `until` the outcome is there."""
        ...

    def propose(self, batch: DraftBatch) -> Drafted:
        """Proposes for these rows; L is 0 in all others."""
        ...

    def speculate(self) -> None:
        """Works ahead; called in every step, when its forward, if any, was dispatched."""
        ...

    def proposal(self) -> Any:
        """What `propose` has proposed, as `sampling.proposal.Proposal`: waits for each q that is
        still on its way. Called once a round, behind `speculate`."""
        ...


class Promotion(NamedTuple):
    """How the records of a draft go on once the outcomes of their verifications are known.

    Attributes:
      position: [B] int32, absolute position of the new pending token; `IDLE` is no record.
      pending: [B] int32, that token.
      committed: [B, W] int32, output tokens since the last promotion, the pending one included,
        padded with -1.
      winner: [B] int32, the branch that becomes the record; -1 where none does.
      tokens: [B, K] int32, proposed tokens that the draft did not make, where no branch wins.
      limit: [B] int32, tokens of the record: of the branch, no more than it is known to have, or
        how many of `tokens` there are.
    """

    position: Array
    pending: Array
    committed: Array
    winner: Array
    tokens: Array
    limit: Array


def promotion(slots: int, k: int, width: int | None = None) -> Promotion:
    """No record in any row, to be filled in; of K tokens, after `width` (K + 1) committed ones."""
    none = np.full(slots, -1, np.int32)
    return Promotion(
        position=np.full(slots, IDLE, np.int32),
        pending=np.zeros(slots, np.int32),
        committed=np.full((slots, k + 1 if width is None else width), -1, np.int32),
        winner=none,
        tokens=np.zeros((slots, k), np.int32),
        limit=np.zeros(slots, np.int32),
    )


def padded(tokens: Mapping[int, Sequence[int]], slots: int, width: int) -> np.ndarray:
    """Tokens by slot as rows [B, W] int32, padded with -1; W is at least `width`."""
    rows = np.full((slots, max(width, *map(len, tokens.values()), 0)), -1, np.int32)
    for slot, row in tokens.items():
        rows[slot, : len(row)] = row
    return rows


Absence = Literal["late", "stale", "dead"]
"""Why there are no branches: they did not come in time, the draft is still at an earlier round and
was not asked, or there is no draft now."""
ABSENCES: tuple[Absence, ...] = get_args(Absence)


class BranchingDraft(Protocol):
    """A draft that speculates for several verification outcomes at once.

    It holds a record of each slot, the speculation that the target verifies, and branches of it.

    Attributes:
      slots: rows of every call.
      k: most tokens of a record or branch.
      branches: M, most branches a slot.
    """

    slots: int
    k: int
    branches: int

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Takes prompt tokens, the last one too."""
        ...

    def promote(self, promotion: Promotion) -> None:
        """Gives these slots new records; idle ones have none. Branches are gone."""
        ...

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> np.ndarray:
        """Drafts records of `limits` [B] tokens just in time; 0 leaves a record as it is.

        `lowered` [B, K]: D of Saguaro sampling for each token.

        Returns: how many tokens there will be [B]: `limits`, or 0 where the draft did not answer.
        """
        ...

    def tokens(self) -> Any:
        """The records' tokens [B, K], for the target's forward."""
        ...

    def proposal(self) -> Any:
        """The records' proposals: waits for each q that is on its way. Called once a round, behind
        `expand`, if there is one."""
        ...

    def confidence(self) -> np.ndarray:
        """Waits for the draft's confidence in tokens drafted just in time [B, K]; -1 is unknown."""
        ...

    def expand(
        self, counts: np.ndarray, *, follow: np.ndarray, lowered: np.ndarray, forwards: int
    ) -> None:
        """Branches off every record.

        Args:
          counts: [B, K + 1], F_0..F_L of each slot.
          follow: [B] bool, slots whose record has tokens that the draft did not make.
          lowered: [B, K], D of Saguaro sampling for each token of the branches.
          forwards: how many; the first gives branches of k < L a token, those of k = L start with
            the second.
        """
        ...

    def branch_tokens(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Waits until that many forwards have made the branches, or says why there are none.

        It may be asked again for more of the same expansion.

        Args:
          until: ends the wait, once it is true, with None: they may still come.
        """
        ...


class Target(Protocol):
    """The target role: slots, and programs that are dispatched without waiting.

    Attributes:
      slots: rows of a batched forward.
      context: most positions a sequence may have, prompt and output together.
      max_chunk: most prompt tokens one prefill takes.
    """

    slots: int
    context: int
    max_chunk: int

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Writes the keys and values of prompt tokens that others will follow."""
        ...

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Pending:
        """Prefills the prompt's last tokens and draws the first token, in row 0."""
        ...

    def forward(
        self, pending: np.ndarray, lengths: np.ndarray, drafted: Drafted | None = None
    ) -> Any:
        """Runs each row's pending token [B] at position lengths [B] and the proposed ones after it.

        Returns: the logits, for `accept`.
        """
        ...

    def accept(self, logits: Any, proposal: Any = None) -> Pending:
        """Verifies what `forward` has run; without a proposal, draws the token after the pending
        one."""
        ...
