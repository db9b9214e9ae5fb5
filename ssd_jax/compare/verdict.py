"""Whether rounding explains a fork, from the target's scores of the two tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Verdict = Literal["float", "law", "sampled", "unknown"]
"""float: the target finds the two tokens equal up to rounding. law: it does not, so at least one
of the runs did not keep to its law: a bug, or other settings. sampled: two draws of the same law.
unknown: nothing is known about the target there.
"""

LIMITS = {"float32": 1e-3, "bfloat16": 0.5, "int8": 0.5}
"""Margins, in logits, below which a dtype's rounding may decide between two tokens.

Between passes of different widths over one text, differences of logits among the five likeliest
tokens moved by at most 0.00008 (float32), 0.26 (bfloat16) and 0.14 (int8) on SmolLM2-135M. int8 has
bfloat16's limit: its attention runs in bfloat16.
"""


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
    """The target's view of a fork.

    Attributes:
      a, b: the tokens of both runs.
      best: the largest score among the tokens that may be drawn.
    """

    a: Candidate
    b: Candidate
    best: float

    @property
    def margin(self) -> float:
        """Difference between the scores; infinite if a token is banned."""
        if math.isinf(self.a.score) or math.isinf(self.b.score):
            return math.inf
        return abs(self.a.score - self.b.score)


def judge(scores: Scores, limit: float, *, certain: bool, bitwise: bool) -> Verdict:
    """The verdict on a fork.

    Args:
      scores: from the target, after the common text.
      limit: from `LIMITS`.
      certain: whether both runs surely had the settings that the scores are of. If not, and neither
        token is near the best, then the settings are to blame, and nothing is known.
      bitwise: whether both runs promised bitwise exactness, which leaves nothing to rounding.
    """
    ahead, behind = sorted((scores.a, scores.b), key=lambda token: token.score, reverse=True)
    if not any(_chosen(token, scores.best, limit) for token in (ahead, behind)):
        return "law" if certain else "unknown"
    close = scores.margin < limit or ahead.may_go
    return "float" if close and ahead.may_stay and behind.may_stay and not bitwise else "law"


def _chosen(token: Candidate, best: float, limit: float) -> bool:
    """Whether rounding could make it the target's choice."""
    return token.may_stay and best - token.score < limit
