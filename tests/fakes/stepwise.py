"""Answers of scripted drafts: each part of an answer is a method that a test may replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ssd_jax.roles.records import ExpansionRequest, RecordRequest, Share, record_request


class StepwiseDraft:
    """A draft whose `record` and `expand` call one method for each thing that they ask for.

    A derived class has `promote(promotion)`, `draft(limits, lowered=) -> lengths()`, `tokens()`,
    `confidence()`, `proposal()`, `branch_off(counts, follow=, lowered=, forwards=, skip=)` and
    `branch_tokens(forwards, until)`.

    Attributes:
      share: that the last expansion was asked for.
    """

    nodes, share = 0, Share()

    def set_pages(self, slot, pages) -> None:
        pass

    def record(self, request: RecordRequest) -> StepwiseRecords:
        self.promote(request.promotion)
        wait = None
        if request.drafts.any():
            wait = self.draft(request.drafts, lowered=request.lowered)
        return StepwiseRecords(self, wait, np.zeros_like(request.drafts))

    def expand(self, request: ExpansionRequest) -> StepwiseBranches:
        asked = request._asdict()
        if asked["skip"] is None:
            del asked["skip"]
        self.share = asked.pop("share")
        self.branch_off(asked.pop("counts"), **asked)
        return StepwiseBranches(self)

    def close(self) -> None:
        pass


@dataclasses.dataclass
class StepwiseRecords:
    draft: Any
    wait: Callable[[], np.ndarray] | None
    nothing: np.ndarray

    def lengths(self) -> np.ndarray:
        return self.nothing if self.wait is None else self.wait()

    def tokens(self):
        return self.draft.tokens()

    def parents(self) -> None:
        """Records are chains."""

    def confidence(self) -> np.ndarray:
        return self.draft.confidence()

    def proposal(self):
        return self.draft.proposal()


@dataclasses.dataclass
class StepwiseBranches:
    draft: Any

    def branches(self, forwards, until=None):
        return self.draft.branch_tokens(forwards, until)

    def grow(self) -> None:
        self.draft.grow()


def asked_records(draft, promotion, drafts=None, lowered=None):
    """Asks a draft for records; by default for nothing just in time."""
    request = record_request(promotion)
    if drafts is not None:
        request = request._replace(drafts=np.asarray(drafts, np.int32))
    return draft.record(request if lowered is None else request._replace(lowered=lowered))


def asked_branches(draft, counts, forwards):
    """Asks a draft to expand records whose tokens are its own."""
    slots, width = counts.shape
    lowered = np.zeros((slots, width - 1), np.int32)
    return draft.expand(ExpansionRequest(counts, np.zeros(slots, bool), lowered, forwards))
