"""Records of trees, as a draft that branches off them answers."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.roles.handles import TokenArray
from ssd_jax.roles.protocols import RecordAnswer
from ssd_jax.roles.records import Promotion, Row
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.proposal import Proposal


class TreeRecords(RecordAnswer):
    """Records whose tokens the host has.

    Args:
      drawn: their proposal on the draft's devices; None where the rule reads no q.
    """

    def __init__(self, promotion: Promotion, drawn: Proposal | None = None) -> None:
        self._promotion, self._drawn = promotion, drawn

    @override
    def lengths(self) -> Row:
        return np.zeros_like(self._promotion.limit)

    @override
    def tokens(self) -> TokenArray:
        return self._promotion.tokens

    @override
    def parents(self) -> TokenArray | None:
        return self._promotion.parents

    @override
    def confidence(self) -> Int32[np.ndarray, "B m"]:
        return np.full(self._promotion.tokens.shape, UNKNOWN, np.int32)

    @override
    def proposal(self) -> Proposal:
        """The nodes as point masses where the rule of their verification reads no q."""
        if self._drawn is not None:
            return self._drawn
        tokens, length = self._promotion.tokens, self._promotion.limit
        return Proposal(tokens, length, tokens[..., None], np.ones((*tokens.shape, 1), np.float32))


class DraftedTrees(TreeRecords):
    """Records of which some have trees that were drafted just in time.

    Args:
      drafts: most tokens of a path of these.
      proposal: of all slots, on the draft's devices.
      parents: of its nodes.
    """

    def __init__(
        self, promotion: Promotion, drafts: Row, proposal: Proposal, parents: jax.Array
    ) -> None:
        super().__init__(promotion)
        self._drafts, self._proposal, self._parents = drafts, proposal, parents

    @override
    def lengths(self) -> Row:
        """At once: whatever is dispatched will be drafted."""
        return self._drafts

    @override
    def tokens(self) -> TokenArray:
        return self._proposal.tokens

    @override
    def parents(self) -> jax.Array:
        return self._parents

    @override
    def proposal(self) -> Proposal:
        return self._proposal
