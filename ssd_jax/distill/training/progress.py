"""How far training is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator

SECONDS_BETWEEN_LINES = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """After a step.

    Attributes:
      step, steps: done, and in all.
      loss, acceptance: running means over training text; no acceptance where nothing is known of
        the target's probabilities.
      held_out: acceptance on held-out text at the last look; None before the first, and without.
      tokens_per_second: of text, padding left out, in this run.
      seconds_left: at this speed.
    """

    step: int
    steps: int
    loss: float
    acceptance: float | None
    held_out: float | None
    tokens_per_second: float
    seconds_left: float

    def __str__(self) -> str:
        accepted = "" if self.acceptance is None else f"  acceptance {self.acceptance:.3f}"
        held_out = "" if self.held_out is None else f" (held-out {self.held_out:.3f})"
        minutes, seconds = divmod(round(self.seconds_left), 60)
        hours, minutes = divmod(minutes, 60)
        return (
            f"loss {self.loss:.4f}{accepted}{held_out}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {hours}:{minutes:02}:{seconds:02} left"
        )


@contextlib.contextmanager
def training_bar() -> Iterator[Callable[[Report], None]]:
    """A bar on standard error that takes reports."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = ("training", BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=None)
        yield lambda report: bar.update(
            task, completed=report.step, total=report.steps, description=str(report)
        )


def _lines() -> Callable[[Report], None]:
    said = time.monotonic() - SECONDS_BETWEEN_LINES

    def say(report: Report) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= SECONDS_BETWEEN_LINES or report.step == report.steps:
            said = now
            print(f"step {report.step} of {report.steps}: {report}", file=sys.stderr, flush=True)

    return say
