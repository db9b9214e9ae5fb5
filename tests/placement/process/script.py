"""A scripted draft for workers: no model, no JAX, and nothing of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ssd_jax.placement.process.supervisor import WorkerResources, WorkerSettings
from ssd_jax.roles.drafting import Drafting
from ssd_jax.roles.records import IDLE, BranchTokens, Promotion
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.wire.draft_spec import DraftSpec
from tests.fakes.branches import Branch, Record, as_branch_tokens
from tests.fakes.stepwise import StepwiseDraft

SLOTS, K, M, N = 2, 3, 6, 2
PROMPT = 5
Q = tuple(np.float32([0.7, 0.3]).tolist())
"""Of a token and the one after it: in fewer bits than float32 has they do not sum to 1."""
TOKEN = "secret"
HELLO = DraftSpec(
    model="scripted",
    slots=SLOTS,
    context=512,
    tokens=128,
    drafting=Drafting(k=K, support=N, rule="ratio", branches=M),
    budgets=(M,),
    dtype="float32",
)


def drafting(spec, **fields):
    """A spec with other fields of its `drafting`."""
    other = dataclasses.replace(spec.drafting, **fields)
    return msgspec.structs.replace(spec, drafting=other)


SETTINGS = WorkerSettings(token=TOKEN, spec=HELLO, resources=WorkerResources(source="scripted"))


def token_at(position: int) -> int:
    """The token of every text at a position."""
    return 33 + position * position * 7 % 89


def missed(position: int) -> bool:
    """Where no branch has the right bonus token."""
    return position % 11 == 0


class Proposed(NamedTuple):
    tokens: np.ndarray
    length: np.ndarray
    support: np.ndarray
    q: np.ndarray


class ScriptedDraft(StepwiseDraft):
    """See `session.GrowingDraft`; fails where what it is told is not the text, or not all of it."""

    k = K

    def __init__(self, spec: DraftSpec = HELLO) -> None:
        self.slots, self.branches = spec.slots, spec.branches
        self._texts: dict[int, list[int]] = {}
        self._counted: dict[int, list[int]] = {}
        self._records: dict[int, Record] = {}
        self._branches: dict[int, list[Branch]] = {}
        self.forwards = 0

    def open(self, opening) -> None:
        self._texts[opening.slot], self._counted[opening.slot] = [], []

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        text = self._texts[slot]
        assert offset <= len(text), "a gap"
        text[offset:] = tokens

    def promote(self, promotion: Promotion) -> None:
        records = {}
        for slot in np.flatnonzero(promotion.position != IDLE).tolist():
            text, position = self._texts[slot], int(promotion.position[slot])
            committed = [token for token in promotion.committed[slot].tolist() if token >= 0]
            if len(text) <= position:
                text += committed[len(text) - position - 1 :]
            assert text == [token_at(at) for at in range(position + 1)]
            assert text[-1] == promotion.pending[slot]
            self._counted[slot] += committed
            output = len(self._counted[slot])
            assert output >= len(text) - PROMPT - 2, "committed tokens were not counted"
            assert self._counted[slot] == text[len(text) - output :]
            winner, limit = promotion.winner[slot], int(promotion.limit[slot])
            tokens = promotion.tokens[slot, :limit].tolist()
            if winner >= 0:
                branch = self._branches[slot][winner]
                assert branch.path == text[self._records[slot].start + 1 :], "another outcome"
                tokens = branch.tokens[:limit]
                assert len(tokens) == limit, "more than the branch has"
            records[slot] = Record(position, tokens, winner < 0 and limit > 0)
        for slot in self.slots_without(records):
            assert (promotion.committed[slot] == -1).all()
        self._records, self._branches = records, {}

    def slots_without(self, records) -> list[int]:
        return [slot for slot in range(self.slots) if slot not in records]

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        assert lowered.shape == (self.slots, K)
        for slot in np.flatnonzero(limits):
            record = self._records[slot]
            assert not record.tokens
            begin = record.start + 1
            record.tokens = [token_at(at) for at in range(begin, begin + limits[slot])]
        return lambda: limits

    def tokens(self) -> np.ndarray:
        return self.proposal().tokens

    def proposal(self) -> Proposed:
        tokens, length = np.zeros((self.slots, K), np.int32), np.zeros(self.slots, np.int32)
        for slot, record in self._records.items():
            length[slot] = len(record.tokens)
            tokens[slot, : length[slot]] = record.tokens
        support = np.stack([tokens, (tokens + 1) % 128], -1).astype(np.int32)
        q = np.tile(np.float32(Q), (self.slots, K, 1))
        return Proposed(tokens, length, support, q)

    def branch_off(self, counts, *, follow, lowered, forwards, skip) -> None:
        assert forwards == 1
        assert not self._branches
        self.forwards = 1
        for slot, record in self._records.items():
            if not counts[slot].any():
                continue
            assert follow[slot] == record.host
            last = len(record.tokens)
            assert counts[slot, last] >= 1
            assert not counts[slot, last + 1 :].any()
            self._branches[slot] = []
            for k, count in enumerate(counts[slot]):
                at = record.start + k + 1
                for rank in range(skip[slot, k], skip[slot, k] + count):
                    drafted = record.tokens[k] if k < last else None
                    right = rank == 0 and not missed(at) and token_at(at) != drafted
                    bonus = token_at(at) if right else 1 + rank
                    branch = Branch([*record.tokens[:k], bonus], [])
                    self._branches[slot].append(branch)
                    if k < last:
                        self._more(record, branch)

    def grow(self) -> None:
        self.forwards += 1
        for slot, branches in self._branches.items():
            for branch in branches:
                self._more(self._records[slot], branch)

    def _more(self, record: Record, branch: Branch) -> None:
        at = record.start + len(branch.path) + len(branch.tokens) + 1
        if len(branch.tokens) < K:
            branch.tokens.append(token_at(at) if at % 7 else 2)  # wrong at each seventh position

    def confidence(self) -> np.ndarray:
        return np.full((self.slots, K), UNKNOWN, np.int32)

    def branch_tokens(self, forwards, until=None) -> BranchTokens:
        return as_branch_tokens(self._branches, (self.slots, self.branches, self.k), self.forwards)

    def finish(self) -> None:
        pass
