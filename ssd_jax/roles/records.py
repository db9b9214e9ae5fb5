"""Records that engine, drafters and devices exchange; a round is in arrays of B slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32

from ssd_jax.roles.activity import Activity
from ssd_jax.roles.handles import TokenArray
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.params import SamplingParams

Row = Int32[np.ndarray, "B"]

Masks = Int32[np.ndarray, "B W mask"]
"""Which tokens may follow each of W positions of a row, see `sampling.masks`; the first follows the
pending token, the one at i + 1 proposed token i. Rows of the others allow all."""

IDLE = -1
"""Length of a slot that a batched forward must leave alone."""

ALL = 2**31 - 1
"""More tokens than any text has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSetup:
    """What a draft of the engine's process is made for.

    Attributes:
      slots: B, rows of every call.
      k: K, most tokens of a proposal.
      ids: number of token ids; proposed tokens are below.
      context: most positions of a sequence, prompt and output together.
      support: N, most ids of a q.
      branches: M, most branches a slot; 0 in mode sd.
    """

    slots: int
    k: int
    ids: int
    context: int
    support: int = 1
    branches: int = 0


@dataclasses.dataclass(frozen=True)
class SlotOpening:
    """A new request in a slot, as the roles are told of it.

    Attributes:
      params: how it is sampled.
      index: of the request; with `params.seed` it selects its noise.
      banned: ids that are impossible at positions below `ban_before`.
      pages: of its keys and values, where slots share a stock of pages.
      reused: positions whose keys and values are in the first of these pages already. `prefill` is
        also given their tokens, and runs none of them.
      prompt: tokens of its prompt. Tokens given to `prefill` behind them are output, of a request
        that continues.
      bad_word_ids: sequences of tokens; the last is impossible where the output ends with the
        others.
      branches: whether a draft of mode ssd prepares branches from its prompt on; see
        `DraftBatch.branches`.
      masked: whether verifications get masks of its grammar.
    """

    slot: int
    params: SamplingParams
    index: int = 0
    banned: Sequence[int] = ()
    ban_before: int = 0
    pages: Sequence[int] = ()
    reused: int = 0
    prompt: int = ALL
    bad_word_ids: Sequence[Sequence[int]] = ()
    branches: bool = True
    masked: bool = False


class TopLogprobs(NamedTuple):
    """Log-probabilities of W emitted tokens a row, and of the likeliest beside each, descending."""

    chosen: Float32[np.ndarray, "B W"]
    ids: Int32[np.ndarray, "B W n"]
    values: Float32[np.ndarray, "B W n"]


class Outcomes(NamedTuple):
    """The verification outcomes (k, t*) of a round.

    Attributes:
      accepted: k.
      tokens: the first k + 1 are emitted: the accepted tokens, then the bonus token, which is
        `params.NO_TOKEN` where no token can be drawn.
      logprobs: of `tokens`, where the target was told to report them.
      node: row of the last accepted token in a tree of proposed ones, 0 where none was accepted;
        see `sampling.topology`. None after chains, where it is k.
      batch: slots that the verification ran, with their programs; 0 where that is not known.
    """

    accepted: Row
    tokens: Int32[np.ndarray, "B W"]
    logprobs: TopLogprobs | None = None
    node: Row | None = None
    batch: int = 0


class CacheLookup(NamedTuple):
    """Result of looking up the outcomes (k, t*) of a round in the cache."""

    branch: Row  # prepared for the outcome; -1 where none was
    k: Row  # accepted tokens, or the row of a tree behind them; -1 in rows without an outcome
    prepared: Row  # number of branches for this k
    rank: Row  # place of t* among their bonus tokens, from 0; -1 where it is none of them
    lengths: Int32[np.ndarray, "B M"]  # tokens of all branches; M is 0 if there are none
    bonus: Int32[np.ndarray, "B M"] | None = None  # bonus token of each branch; -1 is no branch
    ends: Sequence[Sequence[int]] = ()  # of the branches of each k, by row; empty with trees
    node: Int32[np.ndarray, "B M"] | None = None  # row of each branch's outcome; None with chains


Absence = Literal["late", "stale", "dead"]
"""Why there are no branches: they did not come in time, the draft is still at an earlier round and
was not asked, or there is no draft now."""

ABSENCES: tuple[Absence, ...] = get_args(Absence)


class BranchTrees(NamedTuple):
    """The trees of an expansion's branches, where proposals are trees.

    Attributes:
      node: row of the record's tree behind which the bonus token comes: with it, the outcome.
      parents: of each branch's nodes; see `sampling.topology`.
    """

    node: Int32[np.ndarray, "B M"]
    parents: Int32[np.ndarray, "B M nodes"]


class BranchTokens(NamedTuple):
    """The tokens of an expansion's branches: K each, or the nodes of trees."""

    bonus: Int32[np.ndarray, "B M"]  # bonus token of each branch's outcome; -1 is no branch
    lengths: Int32[np.ndarray, "B M"]  # tokens so far
    tokens: Int32[np.ndarray, "B M K"]
    confidence: Int32[np.ndarray, "B M K"]  # the draft's, see `sampling.confidence`
    forwards: int  # number that have made them
    absent: Mapping[int, Absence] = MappingProxyType({})  # slots whose draft does not answer
    trees: BranchTrees | None = None  # None are chains, in the order of k


@dataclasses.dataclass
class Drafted:
    """Proposed tokens of a round, perhaps still computing; `Drafter.proposal` gives their q.

    Attributes:
      lengths: L of each slot, known at once; most tokens of a path, in a tree.
      tokens: [B, K] int32, for the target's forward; [B, m] of the nodes of a tree.
      parents: [B, m] int32, the tree that the tokens are; None is a chain.
      chains: slots whose tree is a chain, which their sampling demands.
      sources: by slot, where a speculation cache was looked up: "hit", or why there was no hit.
        Rows that were to have no branches are left out, unless the draft did not answer.
      lookup: of the cache.
      activity: of a draft with devices of its own, since the last proposal; known once `speculate`
        was called.
    """

    lengths: Row
    tokens: TokenArray
    sources: Mapping[int, str] = dataclasses.field(default_factory=dict)
    lookup: CacheLookup | None = None
    activity: Activity | None = None
    parents: TokenArray | None = None
    chains: Collection[int] = ()


class ProposedTokens(NamedTuple):
    """The tokens of a `Drafted`, on the host.

    Attributes:
      parents: the tree that they are; None is a chain.
    """

    tokens: Int32[np.ndarray, "B K"]
    parents: Int32[np.ndarray, "B K"] | None = None


class DraftBatch(NamedTuple):
    """Input of `Drafter.propose`; rows that get no proposal are idle.

    Attributes:
      pending: the pending token, t* of the last round.
      position: absolute, of the pending token; `IDLE` leaves a row alone.
      tokens: committed by the row's last round, the pending token last.
      counts: number of those tokens. Tokens given to a `propose` that failed come again, at the
        same position.
      limit: most tokens to propose, at least 1; 0 in idle rows.
      room: tokens that may still be committed.
      node: where in its tree the row's last round ended; see `Outcomes`.
      branches: 1 where a draft of mode ssd is to prepare branches for the outcome of this round; 0
        where it is to draft just in time (mode sd).
    """

    pending: Row
    position: Row
    tokens: Int32[np.ndarray, "B W"]
    counts: Row
    limit: Row
    room: Row
    node: Row
    branches: Row

    @property
    def slots(self) -> list[int]:
        """Rows that are not idle."""
        return [slot for slot, limit in enumerate(self.limit.tolist()) if limit]


def draft_batch(slots: int, width: int) -> DraftBatch:
    """Idle rows, to be filled in; `width` is the most tokens that a round commits."""
    pending, counts, limit, room, node = np.zeros((5, slots), np.int32)
    position, tokens = np.full(slots, IDLE, np.int32), np.full((slots, width), -1, np.int32)
    branches = np.ones(slots, np.int32)
    return DraftBatch(pending, position, tokens, counts, limit, room, node, branches)


class Promotion(NamedTuple):
    """How the records of a draft go on once the outcomes of their verifications are known.

    Attributes:
      position: absolute, of the new pending token; `IDLE` is no record.
      pending: that token.
      committed: output tokens since the last promotion, including the pending one, padded with -1.
      winner: the branch that becomes the record; -1 where none does.
      tokens: of the record: the branch's, or, where no branch wins, tokens that the draft did not
        make.
      limit: number of tokens of the record, no more than the branch is known to have.
      node: where in the tree of the last record its round ended; 0 of a draft that has run the
        text up to `position` since. None where records are chains.
      parents: of `tokens`, where they are a tree; None is a chain.
    """

    position: Row
    pending: Row
    committed: Int32[np.ndarray, "B W"]
    winner: Row
    tokens: Int32[np.ndarray, "B K"]
    limit: Row
    node: Row | None = None
    parents: Int32[np.ndarray, "B K"] | None = None

    @property
    def live(self) -> Bool[np.ndarray, "B"]:
        """Rows that get a record or count tokens."""
        return (self.position >= 0) | (self.committed >= 0).any(axis=1)

    @property
    def before_pending(self) -> Row:
        """The committed token before each pending one; 0 where there is none."""
        place = np.maximum((self.committed >= 0).sum(axis=1) - 2, 0)
        return np.maximum(self.committed[np.arange(len(place)), place], 0)


def no_promotion(slots: int, k: int, width: int | None = None, nodes: int = 0) -> Promotion:
    """No record in any row, to be filled in.

    Args:
      k: tokens of a record that is a chain.
      width: of the committed tokens; None is k + 1.
      nodes: tokens of a record that is a tree, whose paths have k; 0 is a chain.
    """
    trees = {}
    if nodes:
        chain = np.arange(nodes, dtype=np.int32)
        trees = {"node": np.zeros(slots, np.int32), "parents": np.tile(chain, (slots, 1))}
    return Promotion(
        position=np.full(slots, IDLE, np.int32),
        pending=np.zeros(slots, np.int32),
        committed=np.full((slots, k + 1 if width is None else width), -1, np.int32),
        winner=np.full(slots, -1, np.int32),
        tokens=np.zeros((slots, nodes or k), np.int32),
        limit=np.zeros(slots, np.int32),
        **trees,
    )


class RecordRequest(NamedTuple):
    """New records of a draft; all branches of the records before are dropped.

    Attributes:
      promotion: of every slot; idle slots get no record.
      drafts: number of tokens to draft just in time; 0 leaves a record as the promotion has it.
      lowered: D of Saguaro sampling for each of these tokens.
    """

    promotion: Promotion
    drafts: Row
    lowered: Int32[np.ndarray, "B K"]


def record_request(promotion: Promotion) -> RecordRequest:
    """Records of promotions with K + 1 committed tokens, and nothing to draft just in time."""
    drafts, lowered = np.zeros_like(promotion.limit), np.zeros_like(promotion.committed[:, 1:])
    return RecordRequest(promotion, drafts, lowered)


class Share(NamedTuple):
    """Of a tree's outcomes those that a draft has branches for, where several drafts share them.

    An outcome, the continuation of some rank behind a row, is of the draft whose number is
    (row + rank) mod `parts`, whatever its tokens are.
    """

    number: int = 0
    parts: int = 1


class ExpansionRequest(NamedTuple):
    """Branches off every record.

    Attributes:
      counts: F_0..F_L of each slot. Of a tree's outcomes the likeliest get branches, with any k for
        which this is not 0.
      follow: slots whose record has tokens that the draft did not make.
      lowered: D of Saguaro sampling for each token of the branches.
      forwards: number of forwards; the first gives branches of k < L a token, branches of k = L
        start with the second.
      skip: number of ranks of each k that other drafts have branches for; None is none.
      share: of the outcomes of trees.
    """

    counts: Int[np.ndarray, "B F"]
    follow: Bool[np.ndarray, "B"]
    lowered: Int32[np.ndarray, "B K"]
    forwards: int
    skip: Int[np.ndarray, "B F"] | None = None
    share: Share = Share()


def no_branches(
    slots: int, branches: int, k: int, forwards: int = 0, nodes: int = 0
) -> BranchTokens:
    """No branches in any slot, to be filled in: chains of k tokens, or trees of `nodes`."""
    shape, width = (slots, branches), nodes or k
    trees = BranchTrees(np.full(shape, -1, np.int32), np.zeros((*shape, nodes), np.int32))
    return BranchTokens(
        bonus=np.full(shape, -1, np.int32),
        lengths=np.zeros(shape, np.int32),
        tokens=np.zeros((*shape, width), np.int32),
        confidence=np.full((*shape, width), UNKNOWN, np.int32),
        forwards=forwards,
        trees=trees if nodes else None,
    )


def pad_rows(
    tokens: Mapping[int, Sequence[int]], slots: int, width: int
) -> Int32[np.ndarray, "B W"]:
    """Tokens by slot as rows, padded with -1; W is at least `width`."""
    rows = np.full((slots, max(width, *map(len, tokens.values()), 0)), -1, np.int32)
    for slot, row in tokens.items():
        rows[slot, : len(row)] = row
    return rows
