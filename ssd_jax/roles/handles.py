"""What roles hand to each other without looking inside: it may still be computing."""

from __future__ import annotations

from typing import Protocol


class TokenArray(Protocol):
    """Token ids [B] or [B, K], int32: a NumPy array, or an array on its way from a device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """B, or B and K."""
        ...


class ProposalHandle(Protocol):
    """Proposed tokens with their q; on devices a `sampling.proposal.Proposal`."""

    @property
    def tokens(self) -> TokenArray:
        """[B, K]."""
        ...


class LogitsHandle(Protocol):
    """Logits [B, K + 1, V], which only the target that made them reads."""
