"""Toy drafts that share work behind the product's own classes, and what a toy target takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ssd_jax.sampling.proposal import Proposal
from tests.speculation.enumeration.host_roles import Proposed, ToyDraft


class PartOfToys:
    """Makes tokens and proposals of a toy arrays; a q is what the target looks at."""

    page_size = 0

    def lose(self, pages: Any) -> None:
        pass

    def tokens(self: Any) -> Any:
        found = np.zeros((self.slots, self.nodes or self.k), object)
        for slot, record in self._records.items():
            found[slot, : len(record.tokens)] = record.tokens
        return found

    def proposal(self: Any) -> Any:
        found = np.full(self.slots, None, object)
        for slot, proposed in super().proposal().items():  # type: ignore[misc]
            found[slot] = proposed
        return Proposal(found, found, found, found)

    def close(self) -> None:
        pass


class ForToys:
    """What the toys' target takes."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def record(self, request: Any) -> RecordsForToys:
        return RecordsForToys(self._draft.record(request))


class RecordsForToys:
    """An answer whose proposals are what the toys' target takes."""

    def __init__(self, answer: Any) -> None:
        self.lengths, self.confidence = answer.lengths, answer.confidence
        self._answer = answer

    def tokens(self) -> None:
        """See `ToyDraft.tokens`."""

    def parents(self) -> None:
        """Nothing is drafted just in time as a tree."""

    def proposal(self) -> dict[int, Any]:
        found = self._answer.proposal().q
        return {
            slot: proposed for slot, proposed in enumerate(found) if isinstance(proposed, Proposed)
        }


class Part(PartOfToys, ToyDraft):
    """A toy that is one of several."""
