"""Tuners, which decide K and M of the next rounds.

A choice depends on outcomes of past rounds, on times and on lengths: never on noise, nor on a token
that is yet to be drafted. So it may change what is prepared and how long proposals are, but not the
distribution of the text: not even given other texts, since a tuner of several requests learns only
from those that `teaches` allows. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from typing_extensions import override

from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.fan_out import VerificationStats

Steps = Callable[[], Mapping[int, float]]
"""Returns the seconds of a forward of M branches, by M, as far as they were observed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationPlan:
    """K and M of the next rounds.

    Attributes:
      k: most tokens of a proposal.
      budget: M, branches a sequence; 0 without branches.
      longer: whether one forward more is run, so that branches of k = L have K tokens too.
    """

    k: int
    budget: int = 0
    longer: bool = False

    @property
    def forwards(self) -> int:
        """Number of forwards of the branches."""
        return self.k + self.longer

    @classmethod
    def of_branches(cls, k: int, budget: int) -> SpeculationPlan:
        """A plan with branches; K = 1 gets one forward more, else branches of k = L are empty."""
        return cls(k=k, budget=budget, longer=k == 1)


def teaches(temperature: float, rule: str) -> bool:
    """Whether a tuner that requests share may observe the verifications of a request.

    What a tuner learns outlives its process, and a request of the next process may have the same
    seed and index, and so the same noise. Under a timed rule the number of accepted sampled
    tokens depends on that noise, and a request's text depends on the lengths of its proposals:
    lengths chosen by those numbers would bias it. A text that depends on no length cannot show what
    was learned.

    Args:
      temperature: of the request.
      rule: of its verifications.
    """
    return temperature == 0 or not RULES[rule].timed


class Tuner(Protocol):
    """Decides K and M of the next rounds."""

    def plan(self, *, rows: int, steps: Steps) -> SpeculationPlan:
        """Called once a round, before its branches are divided.

        Args:
          rows: number of sequences that are decoded now.
          steps: returns the observed times.
        """
        ...

    def observe(self, verified: VerificationStats) -> None:
        """Learns, if it can, from a verification of any sequence that `teaches`."""


class FixedTuner(Tuner):
    """Always the same plan."""

    def __init__(self, plan: SpeculationPlan) -> None:
        self._plan = plan

    @override
    def plan(self, *, rows: int, steps: Steps) -> SpeculationPlan:
        return self._plan
