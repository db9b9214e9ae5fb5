"""What the engine asks of its two roles: pure host types, so that tests can give it fakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from ssd_jax.runtime.activity import Activity
from ssd_jax.runtime.request import SamplingParams

IDLE = -1
"""Length of a slot that a batched forward must leave alone."""


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


class Look(NamedTuple):
    """A look-up of an outcome (k, t*) in the speculation cache.

    Attributes:
      k: accepted tokens.
      prepared: branches that there were for this k.
      rank: place of t* among their bonus tokens, from 0; None where it was not prepared for, or
        where there was another reason to propose no branch.
      wasted: tokens of all branches that do not become the proposal.
    """

    k: int
    prepared: int
    rank: int | None
    wasted: int


@dataclasses.dataclass(frozen=True)
class Drafted:
    """Proposed tokens of a round, perhaps still being computed.

    Attributes:
      lengths: [B] int32, L of each slot, known at once.
      proposal: for the target; see `speculation.proposal.Proposal`.
      sources: by slot, where a speculation cache was looked up: "hit", or why there was none.
      settle: gives the proposal with each q that is still on its way, after waiting for it; to be
        called when the tokens' forward is dispatched. None where nothing is on its way.
      looks: by slot, what the look-ups found.
      activity: of a draft with devices of its own, since the last proposal.
    """

    lengths: np.ndarray
    proposal: Any
    sources: Mapping[int, str] = dataclasses.field(default_factory=dict)
    settle: Callable[[], Any] | None = None
    looks: Mapping[int, Look] = dataclasses.field(default_factory=dict)
    activity: Activity | None = None


@dataclasses.dataclass(frozen=True)
class DraftRow:
    """What a drafter needs to know of one slot before it proposes.

    Attributes:
      position: absolute position of the pending token.
      committed: tokens committed since the slot's last proposal; the last one is pending. What a
        `propose` that failed was told comes again.
      limit: most tokens to propose, at least 1.
      room: tokens that may still be committed.
    """

    slot: int
    position: int
    committed: Sequence[int]
    limit: int
    room: int = 2**31


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

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """Empties a slot for a new request; arguments as `Target.open`."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """Takes prompt tokens, at most the target's `max_chunk` at a time."""
        ...

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """Proposes for these slots; L is 0 in all others."""
        ...

    def speculate(self) -> None:
        """Works ahead; called in every step, after its verification, if any, was dispatched."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """How a slot's record goes on once the outcome of its verification is known.

    Attributes:
      position: absolute position of the new pending token.
      committed: output tokens since the slot's last move, the pending one included.
      winner: the branch that becomes the record; -1 where none does.
      tokens: proposed tokens that the draft did not make, where no branch wins.
      limit: tokens of the record where a branch wins, no more than it is known to have.
    """

    slot: int
    position: int
    pending: int
    committed: Sequence[int] = ()
    winner: int = -1
    tokens: Sequence[int] = ()
    limit: int = 0


Absence = Literal["late", "stale", "dead"]
"""Why there is no news: it did not come in time, the draft is still at an earlier round and was not
asked, or there is no draft now."""
ABSENCES: tuple[Absence, ...] = get_args(Absence)


class News(NamedTuple):
    """What the branches of an expansion speculate.

    Attributes:
      proposed: [B, K] int32, tokens of the records.
      bonus: [B, M] int32, bonus token of each branch's outcome; -1 is no branch.
      lengths: [B, M] int32, tokens so far.
      tokens: [B, M, K] int32.
      confidence: [B, M, K] int32, the draft's in each token; see `speculation.confidence`.
      forwards: how many have made them.
    """

    proposed: np.ndarray
    bonus: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray
    forwards: int


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

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """Sets a slot's sampling; arguments as `Target.open`."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Takes prompt tokens, the last one too."""
        ...

    def move(self, moves: Sequence[Moved]) -> None:
        """Gives these slots new records; all others have none. Branches are gone."""
        ...

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> np.ndarray:
        """Drafts records of `limits` [B] tokens just in time; 0 leaves a record as it is.

        `lowered` [B, K]: D of Saguaro sampling for each token.

        Returns: how many tokens there will be [B]: `limits`, or 0 where the draft did not answer.
        """
        ...

    def proposal(self) -> Any:
        """The records' proposals, for the target."""
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

    def news(self, forwards: int) -> News | Absence:
        """Waits until that many forwards have made the branches, or says why there are none.

        It may be asked again for more of the same expansion.
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

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """Sets a slot's sampling; `banned` ids are impossible at positions below `ban_before`."""
        ...

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """Writes the keys and values of prompt tokens that others will follow."""
        ...

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> Pending:
        """Prefills the prompt's last tokens and draws the first token, in row 0."""
        ...

    def forward(
        self, tokens: np.ndarray, lengths: np.ndarray, drafted: Drafted | None = None
    ) -> Pending:
        """Verifies the proposed tokens after each row's pending token [B] at position lengths [B].

        Without any, draws the token after the pending one.
        """
        ...
