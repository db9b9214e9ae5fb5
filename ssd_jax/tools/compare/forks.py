"""A fork of two texts, as the target sees it."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of the two tokens, as the target sees it.

    Attributes:
      score: allowed logit, plus temperature times noise where sampled; -inf if banned.
      may_stay: whether top-k, top-p and min-p keep it, or would if the logits were rounded in its
        favour.
      may_go: whether they drop it, or would if the logits were rounded against it.
    """

    score: float
    may_stay: bool
    may_go: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The target's view of a fork: tokens `a` and `b`, and the `best` score of a drawable token."""

    a: Candidate
    b: Candidate
    best: float

    @property
    def margin(self) -> float:
        """Difference between the scores; infinite if a token is banned."""
        if math.isinf(self.a.score) or math.isinf(self.b.score):
            return math.inf
        return abs(self.a.score - self.b.score)
