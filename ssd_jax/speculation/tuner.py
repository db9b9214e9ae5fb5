"""What decides K and M of the next rounds.

A choice looks at outcomes of past rounds, at times and at lengths: never at noise, nor at a token
that is yet to be drafted. So it may change what is prepared and how long proposals are, and not the
distribution of the text: not even given other texts, for a tuner of several requests learns only
from those that `teaches` lets it. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from ssd_jax.speculation.fan_out import VerificationStats

Steps = Callable[[], Mapping[int, float]]
"""Seconds of a forward of M branches, by M, as far as they were observed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationPlan:
    """What the next rounds are to be like.

    Attributes:
      k: most tokens of a proposal.
      budget: M, branches a sequence; 0 without branches.
      longer: one forward more, so that branches of k = L have K tokens, too.
    """

    k: int
    budget: int = 0
    longer: bool = False

    @property
    def forwards(self) -> int:
        """n, of the branches."""
        return self.k + self.longer

    @classmethod
    def of_branches(cls, k: int, budget: int) -> SpeculationPlan:
        """With K = 1 a forward more, for every branch of k = L would be empty otherwise."""
        return cls(k=k, budget=budget, longer=k == 1)


def teaches(temperature: float, rule: str) -> bool:
    """Whether the verifications of a request may be observed by a tuner that others share.

    What a tuner learns outlives its process, and a request of the next one may have the same seed
    and index, and so the same noise. Under the ratio rule how many of the sampled tokens are
    accepted depends on that noise, and what a request says depends on which lengths it proposes:
    chosen by those counts, they would bias it. A text that depends on no length cannot show what
    was learned.

    Args:
      temperature: of the request.
      rule: "ratio" or "coupled".
    """
    return temperature == 0 or rule == "coupled"


class Tuner(Protocol):
    """Decides what the next rounds are like."""

    def plan(self, *, rows: int, steps: Steps) -> SpeculationPlan:
        """Called once a round, before its branches are divided.

        Args:
          rows: sequences that are decoded now.
          steps: tells what has been observed.
        """
        ...

    def observe(self, verified: VerificationStats) -> None:
        """Learns, if it does, from a verification of any sequence that `teaches`."""


class FixedTuner(Tuner):
    """Always the same plan."""

    def __init__(self, plan: SpeculationPlan) -> None:
        self._plan = plan

    def plan(self, *, rows: int, steps: Steps) -> SpeculationPlan:
        """See `Tuner.plan`."""
        return self._plan
