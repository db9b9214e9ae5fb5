"""The messages between an engine and its draft worker; docs/protocol.md says when each is sent.

Types, constraints and the arrays' `Entries` define what a message may be; `codec.decode` checks all
of it against the `DraftSpec` that both sides agreed on. Anything that does not fit is a
`ProtocolError`, never an index out of range. B, M, K, N, V and C are its slots, branches, k,
support, tokens and context.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from typing_extensions import override

from ssd_jax.roles.activity import WORK
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_IDS
from ssd_jax.wire.draft_spec import DraftMessage, DraftSpec
from ssd_jax.wire.fields import (
    MAX_INT,
    Count,
    Entries,
    Number,
    ProtocolError,
    Seconds,
    Text,
    within,
)

MAX_WORK = 256
"""Most spans of work that an answer reports."""
_MAX_REASON = 2**13  # characters
_CLASSES = len(EDGES) + 1


class Welcome(DraftMessage, frozen=True):
    """Answers a `DraftSpec` that fits."""


def shorten(reason: object) -> str:
    """The reason why a worker gives up, cut to what a message or its first line may have."""
    text = str(reason)
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]} ..."


class Refused(DraftMessage, frozen=True):
    """The last message of a worker that gives up a stream, with the reason."""

    reason: Text


class Open(DraftMessage, frozen=True):
    """A new request in a slot. `epoch` counts requests; messages with another epoch are stale."""

    number: Number
    epoch: Annotated[int, Meta(ge=1, lt=MAX_INT)]
    opening: SlotOpening

    @override
    def check(self, spec: DraftSpec) -> None:
        # Sampling parameters check themselves.
        opening = self.opening
        within("slot", opening.slot, spec.slots)
        biased, words = (token for token, _ in opening.params.logit_bias), opening.bad_word_ids
        for token in itertools.chain(opening.banned, biased, *words):
            within("token", token, spec.tokens)
        within("number of bad words", len(words), MAX_BAD_WORDS + 1)
        for word in words:
            within("number of tokens of a bad word", len(word), MAX_BAD_WORD_TOKENS + 1)
            if not word:
                raise ProtocolError("a bad word without tokens")
        within("number of banned ids", len(opening.banned), MAX_STOP_IDS + 1)
        within("index", opening.index, 2**32)
        within("ban_before", opening.ban_before, spec.context + 1)
        within("prompt", opening.prompt, MAX_INT)
        if spec.pages or opening.pages:
            _check_pages(opening.pages, spec)
            within("reused", opening.reused, len(opening.pages) * spec.page_size)
        elif opening.reused:
            raise ProtocolError(f"{opening.reused} positions reused, where slots share no pages")


class MorePages(DraftMessage, frozen=True):
    """All pages of a slot that has got more since it was opened."""

    number: Number
    slot: Count
    epoch: Count
    pages: tuple[Count, ...]

    @override
    def check(self, spec: DraftSpec) -> None:
        within("slot", self.slot, spec.slots)
        _check_pages(self.pages, spec)


class Prefill(DraftMessage, frozen=True):
    """Tokens from position `offset` on: of the prompt, or committed ones to catch up."""

    number: Number
    slot: Count
    epoch: Count
    offset: Count
    tokens: Annotated[np.ndarray, Entries("n", 0, "V")]

    @override
    def check(self, spec: DraftSpec) -> None:
        within("slot", self.slot, spec.slots)
        end = self.offset + self.tokens.size
        if not self.tokens.size or end > spec.context:
            raise ProtocolError(f"tokens at {self.offset} to {end - 1} of {spec.context}")


class RecordMessage(DraftMessage, frozen=True):
    """New records of all slots that go on: a `roles.RecordRequest`.

    It is answered by `RecordTokens`, if tokens are drafted just in time or a q is needed.

    Attributes:
      epochs: epochs of the slots; 0 for a slot that the message says nothing about.
      position, pending, committed, winner, tokens, limit, node, parents: see `roles.Promotion`;
        `committed` are all tokens since the worker was last told, however many. `parents` are none
        of chains.
      drafts, lowered: see `roles.RecordRequest`.
      sampled: whether the verification needs the q of tokens that the draft made.
    """

    number: Number
    epochs: Annotated[np.ndarray, Entries("B")]
    position: Annotated[np.ndarray, Entries("B", IDLE, "C")]
    pending: Annotated[np.ndarray, Entries("B", 0, "V")]
    committed: Annotated[np.ndarray, Entries("B W", -1, "V")]
    winner: Annotated[np.ndarray, Entries("B", -1, "M")]
    tokens: Annotated[np.ndarray, Entries("B T", 0, "V")]
    limit: Annotated[np.ndarray, Entries("B", 0, "T+1")]
    node: Annotated[np.ndarray, Entries("B", 0, "T+1")]
    parents: Annotated[np.ndarray, Entries("B nodes", 0, "T+1")]
    drafts: Annotated[np.ndarray, Entries("B", 0, "K+1")]
    lowered: Annotated[np.ndarray, Entries("B K")]
    sampled: Annotated[np.ndarray, Entries("B", 0, 2)]

    @override
    def check(self, spec: DraftSpec) -> None:
        if self.drafts.any() and (self.drafts * ((self.winner >= 0) | (self.limit > 0))).any():
            raise ProtocolError("a record is a branch, given tokens, or drafted: one of them")
        within("committed", self.committed.shape[1], spec.context + 1)
        _check_parents(self.parents)


class ExpandMessage(DraftMessage, frozen=True):
    """Branches off the records: a `roles.ExpansionRequest`. A `BranchMessage` answers it, always.

    Attributes:
      epochs: as of `RecordMessage`.
      counts, skip, follow, lowered, forwards: see `roles.ExpansionRequest`.
      part, parts: of the outcomes of trees; see `roles.Share`.
    """

    number: Number
    epochs: Annotated[np.ndarray, Entries("B")]
    counts: Annotated[np.ndarray, Entries("B K+1", 0, "M+1")]
    skip: Annotated[np.ndarray, Entries("B K+1", 0, "V")]
    follow: Annotated[np.ndarray, Entries("B", 0, 2)]
    lowered: Annotated[np.ndarray, Entries("B K")]
    forwards: Count
    part: Count = 0
    parts: Count = 1

    @override
    def check(self, spec: DraftSpec) -> None:
        within("part", self.part, self.parts)
        number = self.counts.max() if spec.nodes else self.counts.sum(axis=1).max()
        within("number of branches", int(number), spec.branches + 1)
        within("forwards", self.forwards, spec.k + 2)
        if not self.forwards:
            raise ProtocolError("an expansion without forwards")


class Work(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A span of the worker's work; see `activity.Busy`."""

    kind: Annotated[str, Meta(max_length=16)]
    begin: Seconds
    end: Seconds


class RoundAnswer(DraftMessage, frozen=True):
    """Answers a `RecordMessage` or an `ExpandMessage`.

    Attributes:
      number: of the message that it answers.
      work: what the worker has done since its last answer.
      received, sent: when that message came, and when this answer was made, on the worker's clock.
      slots, epochs: of the rows that the answer covers.
    """

    number: Number
    work: Annotated[tuple[Work, ...], Meta(max_length=MAX_WORK)]
    slots: Annotated[np.ndarray, Entries("R", 0, "B")]
    epochs: Annotated[np.ndarray, Entries("R")]
    received: Seconds
    sent: Seconds

    @override
    def check(self, spec: DraftSpec) -> None:
        if self.received > self.sent:
            raise ProtocolError(f"sent at {self.sent}, received at {self.received}")
        previous_end = 0.0
        for span in self.work:
            if span.kind not in WORK:
                raise ProtocolError(f"{span.kind!r} is no work")
            if not previous_end <= span.begin <= span.end:
                raise ProtocolError(f"work from {span.begin} to {span.end}, after {previous_end}")
            previous_end = span.end


class RecordTokens(RoundAnswer, frozen=True):
    """Tokens of records that the draft made, with their q.

    Attributes:
      lengths, tokens, confidence: as in `roles.BranchTokens`, but of records.
      parents: of the nodes, as of a `RecordMessage`.
      sampled: those of `slots` whose q was asked for.
      support, q: see `speculation.proposal.Proposal`; checked row by row when used.
    """

    lengths: Annotated[np.ndarray, Entries("R", 0, "T+1")]
    tokens: Annotated[np.ndarray, Entries("R T", 0, "V")]
    parents: Annotated[np.ndarray, Entries("R nodes", 0, "T+1")]
    confidence: Annotated[np.ndarray, Entries("R T", UNKNOWN, _CLASSES)]
    sampled: Annotated[np.ndarray, Entries("S", 0, "B")]
    support: Annotated[np.ndarray, Entries("S T N", -MAX_INT)]
    q: Annotated[np.ndarray, Entries("S T N", dtype="f4")]

    @override
    def check(self, spec: DraftSpec) -> None:
        super().check(spec)
        _check_parents(self.parents)


class BranchMessage(RoundAnswer, frozen=True):
    """The branches after `forwards`; see `roles.BranchTokens`. No more follow after `complete`.

    Attributes:
      node, parents: see `roles.BranchTrees`; none of chains.
    """

    complete: bool
    forwards: Count
    bonus: Annotated[np.ndarray, Entries("R M", -1, "V")]
    lengths: Annotated[np.ndarray, Entries("R M", 0, "T+1")]
    tokens: Annotated[np.ndarray, Entries("R M T", 0, "V")]
    confidence: Annotated[np.ndarray, Entries("R M T", UNKNOWN, _CLASSES)]
    node: Annotated[np.ndarray, Entries("R trees", -1, "T+1")]
    parents: Annotated[np.ndarray, Entries("R trees nodes", 0, "T+1")]

    @override
    def check(self, spec: DraftSpec) -> None:
        super().check(spec)
        within("forwards", self.forwards, spec.k + 2)
        _check_parents(self.parents)


MESSAGES = (
    DraftSpec,
    Welcome,
    Refused,
    Open,
    MorePages,
    Prefill,
    RecordMessage,
    ExpandMessage,
    RecordTokens,
    BranchMessage,
)


def _check_parents(parents: np.ndarray) -> None:
    """A node comes after its parent: node i is row i + 1 of its tree."""
    if (parents > np.arange(parents.shape[-1])).any():
        raise ProtocolError("a node of a tree before its parent")


def _check_pages(pages: Sequence[int], spec: DraftSpec) -> None:
    if not spec.pages:
        raise ProtocolError("pages, where slots share none")
    for page in pages:
        within("page", page, spec.pages)
    max_pages = -(-spec.context // spec.page_size)
    within("number of pages", len(pages) - 1, max_pages)
