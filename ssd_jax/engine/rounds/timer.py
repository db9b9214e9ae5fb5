"""Times whole rounds of an engine, for whoever predicts them. Pure host code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ssd_jax.roles.records import Drafted


class TimedRound(NamedTuple):
    """A round that followed one of the same requests.

    Attributes:
      proposed: L, the most of all rows.
      missed: whether a row was given a backup, since no branch was ready for it.
      seconds: from the outcome before until its own.
      mode: of the round, and of the one before; see `InFlight`.
      rows: number of requests.
      tokens: number of tokens that it emitted.
      reach: slots up to the highest that has one of the requests.
      batch: see `Outcomes`.
    """

    proposed: int
    missed: bool
    seconds: float
    mode: str = "sd"
    rows: int = 1
    tokens: int = 1
    reach: int = 1
    batch: int = 0


class RoundTimer:
    """Reports the rounds that show what a round takes: those that follow a round of the same rows
    in the same mode.

    Left out are rounds with a prompt between, and those whose outcome was there before the step
    that reads it: the caller, who came late, decided how long they took.

    Args:
      report: takes each of those rounds.
      least: number of requests; rounds of fewer are left out.
    """

    def __init__(self, report: Callable[[TimedRound], None], *, least: int = 1) -> None:
        self._report, self._least = report, least
        self._rows: tuple[int, ...] = ()  # of the outcome before
        self._mode = ""
        self._since, self._apart = 0.0, False

    def apart(self) -> None:
        """Marks that the round under way also waits for something else: a prompt, or the caller."""
        self._apart = True

    def read(
        self,
        requests: Sequence[int],
        drafted: Drafted | None,
        now: float,
        *,
        tokens: int = 1,
        mode: str = "sd",
        reach: int = 1,
        batch: int = 0,
    ) -> None:
        """Takes an outcome that was read at `now`.

        Args:
          requests: ids of a round's requests; none of a prompt.
          drafted: the proposal that the round verified.
          tokens, mode, reach, batch: see `TimedRound`.
        """
        rows = tuple(requests)
        follows = rows == self._rows and mode == self._mode
        if follows and len(rows) >= self._least and not self._apart:
            proposed = 0 if drafted is None else int(drafted.lengths.max())
            sources = () if drafted is None else drafted.sources.values()
            missed = any(source != "hit" for source in sources)
            seconds = now - self._since
            facts = mode, len(rows), tokens, reach, batch
            self._report(TimedRound(proposed, missed, seconds, *facts))
        self._rows, self._mode, self._since, self._apart = rows, mode, now, False
