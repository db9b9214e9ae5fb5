"""What decides, from round to round, whether an engine's rounds use its draft, and how."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class RoundPlan(NamedTuple):
    """How rounds speculate.

    Attributes:
      k: most tokens that a round proposes for a row; 0 does without the draft (mode ar).
      branches: whether a draft of mode ssd prepares branches beside the verification; without them
        it drafts just in time (mode sd).
    """

    k: int
    branches: bool = True

    @property
    def mode(self) -> str:
        """The mode that such rounds are of, in an engine of mode ssd."""
        return "ar" if self.k == 0 else "ssd" if self.branches else "sd"


class Planner(Protocol):
    """Decides how rounds speculate. Pure host code.

    A decision may follow from times, lengths and past outcomes, never from noise, nor from a token
    that was drafted and then dropped.

    Attributes:
      timed: whether decisions depend on time, or on other requests, where sampled texts depend on
        lengths; see `Drafter.timed`.
    """

    timed: bool

    def plan(self, reach: int) -> RoundPlan:
        """The plan of the next round, for requests that ask for nothing else. Called once a round.

        Args:
          reach: slots up to the highest that has a request now, or gets one: the round's programs
            run at least these.
        """
        ...
