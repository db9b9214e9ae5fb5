"""What engine, drafters and devices say to each other. A round is said in arrays of B slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ssd_jax.roles.activity import Activity
from ssd_jax.sampling.params import SamplingParams

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


class CacheLookup(NamedTuple):
    """What the outcomes (k, t*) of a round found in the cache.

    Attributes:
      branch: [B] int32, the branch that was prepared for it; -1 where none was.
      k: [B] int32, accepted tokens; -1 in rows without an outcome.
      prepared: [B] int32, branches that there were for this k.
      rank: [B] int32, place of t* among their bonus tokens, from 0; -1 where it is none of them.
      wasted: [B] int32, tokens of all branches, less those that become the proposal.
    """

    branch: np.ndarray
    k: np.ndarray
    prepared: np.ndarray
    rank: np.ndarray
    wasted: np.ndarray


class BranchTokens(NamedTuple):
    """What the branches of an expansion speculate.

    Attributes:
      bonus: [B, M] int32, bonus token of each branch's outcome; -1 is no branch.
      lengths: [B, M] int32, tokens so far.
      tokens: [B, M, K] int32.
      confidence: [B, M, K] int32, the draft's in each token; see `speculation.confidence`.
      forwards: how many have made them.
    """

    bonus: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    confidence: np.ndarray
    forwards: int


@dataclasses.dataclass
class Drafted:
    """Proposed tokens of a round, perhaps still being computed; their q comes with
    `Drafter.proposal`.

    Attributes:
      lengths: [B] int32, L of each slot, known at once.
      tokens: [B, K] int32, for the target's forward.
      sources: by slot, where a speculation cache was looked up: "hit", or why there was none.
      lookup: of the cache.
      activity: of a draft with devices of its own, since the last proposal; known once `speculate`
        was called.
    """

    lengths: np.ndarray
    tokens: Any
    sources: Mapping[int, str] = dataclasses.field(default_factory=dict)
    lookup: CacheLookup | None = None
    activity: Activity | None = None


class DraftBatch(NamedTuple):
    """What a drafter needs to know before it proposes; rows that get no proposal are idle.

    Attributes:
      pending: [B] int32, the pending token, which was t* of the last round.
      position: [B] int32, its absolute position; `IDLE` leaves a row alone.
      tokens: [B, W] int32, what the row's last round has committed, the pending token last.
      counts: [B] int32, how many of them there are. What a `propose` that failed was given comes
        again, at the same position.
      limit: [B] int32, most tokens to propose, at least 1; 0 in idle rows.
      room: [B] int32, tokens that may still be committed.
    """

    pending: np.ndarray
    position: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    limit: np.ndarray
    room: np.ndarray

    @property
    def slots(self) -> list[int]:
        """Rows that are not idle."""
        return [slot for slot, limit in enumerate(self.limit.tolist()) if limit]


def draft_batch(slots: int, width: int) -> DraftBatch:
    """Idle rows, to be filled in; `width` is the most tokens that a round commits."""
    pending, counts, limit, room = np.zeros((4, slots), np.int32)
    position, tokens = np.full(slots, IDLE, np.int32), np.full((slots, width), -1, np.int32)
    return DraftBatch(pending, position, tokens, counts, limit, room)


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
