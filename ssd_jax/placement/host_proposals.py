"""Proposals that an engine holds on the host, for a draft that is elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int
from typing_extensions import override

from ssd_jax.kernels.rows import LONG
from ssd_jax.roles.protocols import RecordAnswer
from ssd_jax.roles.records import Row
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.wire.messages import RecordTokens

_HALF_ULP = 2.0**-24  # largest relative error of a float32 operation


class DraftedTokens(NamedTuple):
    """Tokens of slots that a draft of this process made, with their q; see `RecordTokens`."""

    slots: Int[np.ndarray, "R"]
    lengths: Int[np.ndarray, "R"]
    tokens: Int[np.ndarray, "R K"]
    sampled: Int[np.ndarray, "S"]
    support: Int[np.ndarray, "S K N"]
    q: Float32[np.ndarray, "S K N"]


class HostProposals:
    """Proposed tokens of all slots; point masses until their q comes.

    Args:
      slots, k, support: B, K and N.
      ids: number of token ids.

    Attributes:
      tokens: [B, K] int32; replaced, never written to.
      lengths: [B] int32; likewise.
    """

    def __init__(self, slots: int, k: int, support: int, ids: int) -> None:
        self._shape, self._ids = (slots, k, support), ids
        self._probs: tuple[np.ndarray, np.ndarray] | None = None  # support and q, once needed
        self.put(np.zeros((slots, k), np.int32), np.zeros(slots, np.int32))

    def put(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Proposes the first `lengths` [B] of these tokens [B, K], each with probability 1."""
        self.tokens, self.lengths = np.zeros(tokens.shape, np.int32), lengths
        for slot, length in enumerate(lengths.tolist()):
            if length:
                self.tokens[slot, :length] = tokens[slot, :length]
        self._probs = None

    def _support_and_q(self) -> tuple[np.ndarray, np.ndarray]:
        if self._probs is None:
            support, q = np.full(self._shape, -1, np.int32), np.zeros(self._shape, np.float32)
            for slot, length in enumerate(self.lengths.tolist()):
                support[slot, :length, 0] = self.tokens[slot, :length]
                q[slot, :length, 0] = 1
            self._probs = support, q
        return self._probs

    def put_q(self, slots: np.ndarray, answer: RecordTokens | DraftedTokens) -> int:
        """Takes the q of these slots' tokens; returns the number of rows in which it is malformed.

        From the first token with a malformed q on, a row's tokens are point masses. Tokens before
        it keep their q: the rule that verifies a token may not depend on later draws.
        """
        rows, q_rows = _index_of(slots, answer.slots), _index_of(slots, answer.sampled)
        is_answered = (rows >= 0) & (q_rows >= 0)
        updated, rows, q_rows = slots[is_answered], rows[is_answered], q_rows[is_answered]
        tokens, lengths = self.tokens[updated], self.lengths[updated]
        is_used = np.arange(self._shape[1]) < lengths[:, None]
        support = np.where(is_used[..., None], answer.support[q_rows], -1)
        q = np.where(is_used[..., None], answer.q[q_rows], 0)
        fits = (answer.tokens[rows] == tokens) & self._are_probs(tokens, support, q)
        is_valid = (answer.lengths[rows] >= lengths)[:, None] & (fits | ~is_used)
        is_valid = np.logical_and.accumulate(is_valid, axis=1)
        all_support, all_q = self._support_and_q()
        is_kept = is_valid[..., None]
        all_support[updated] = np.where(is_kept, support, all_support[updated])
        all_q[updated] = np.where(is_kept, q, all_q[updated])
        return len(slots) - int(is_valid.all(axis=1).sum())

    def proposal(self) -> Proposal:
        """The proposal as known now, in arrays that only `put_q` writes to."""
        return Proposal(self.tokens, self.lengths, *self._support_and_q())

    def _are_probs(self, tokens: np.ndarray, support: np.ndarray, q: np.ndarray) -> np.ndarray:
        """Which rows of q [..., N] are distributions over their supports that give their tokens."""
        is_used = support >= 0
        probability = np.where(support == tokens[..., None], q, 0)
        sorted_ids = np.sort(np.where(is_used, support, -1 - np.arange(support.shape[-1])), axis=-1)
        # Weights were divided by their float32 sum: n - 1 additions and a division, and two more
        # operations if that is a product with a reciprocal. Longer rows are summed in parts.
        tolerance = (np.minimum((q > 0).sum(axis=-1), LONG) + 2) * _HALF_ULP
        return (
            (np.isfinite(q) & (q >= 0) & (is_used | (q == 0)) & (support < self._ids)).all(axis=-1)
            & (abs(q.sum(axis=-1, dtype=np.float64) - 1) <= tolerance)
            & (probability.sum(axis=-1) > 0)
            & (np.diff(sorted_ids, axis=-1) > 0).all(axis=-1)
        )


class HostRecords(RecordAnswer):
    """Records of a draft that does not answer: point masses, and nothing drafted just in time.

    Args:
      parents: see `RecordAnswer.parents`.
    """

    def __init__(self, proposals: HostProposals, parents: np.ndarray | None) -> None:
        self._proposals, self._parents = proposals, parents

    @override
    def lengths(self) -> Row:
        return np.zeros_like(self._proposals.lengths)

    @override
    def tokens(self) -> np.ndarray:
        return self._proposals.tokens

    @override
    def parents(self) -> np.ndarray | None:
        return self._parents

    @override
    def confidence(self) -> np.ndarray:
        return np.full(self._proposals.tokens.shape, UNKNOWN, np.int32)

    @override
    def proposal(self) -> Proposal:
        return self._proposals.proposal()


def _index_of(slots: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The index of each wanted slot among others; -1 if it is missing or occurs twice."""
    is_same = slots[:, None] == others
    return np.where(is_same.sum(axis=1) == 1, is_same @ np.arange(len(others)), -1)
