"""What decides, from round to round, whether an engine's rounds use its draft."""

from __future__ import annotations

from typing import Protocol


class Planner(Protocol):
    """Decides most tokens that rounds propose. Pure host code.

    A decision may follow from times, lengths and past outcomes, never from noise, nor from a token
    that was drafted and then dropped.

    Attributes:
      timed: whether decisions depend on time, or on other requests, where sampled texts depend on
        lengths; see `Drafter.timed`.
    """

    timed: bool

    def most_proposed(self, rows: int) -> int:
        """Most tokens that the next round proposes for a row; 0 does without the draft.

        Called once a round.

        Args:
          rows: requests that are decoded now, or enter a slot.
        """
        ...
