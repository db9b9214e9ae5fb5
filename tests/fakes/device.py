"""A device beside the host, by a clock that work moves."""

from __future__ import annotations

from typing import Any

from tests.fakes.instrument import instrument
from tests.fakes.watch import Watch


def run_beside_host(target: Any, watch: Watch, seconds: float = 1.0) -> Any:
    """Has a target's programs end so many seconds after they begin, one after the other."""
    end = watch.now

    def start(*_args: Any) -> None:
        nonlocal end
        end = max(end, watch.now) + seconds

    return instrument(
        target,
        note={"forward": start, "prefill_last": start},
        change={"outcomes": lambda outcomes: Running(outcomes, watch, end)},
    )


class Running:
    """Outcomes of a program that ends at a time of the clock."""

    def __init__(self, outcomes: Any, watch: Watch, end: float) -> None:
        self._outcomes, self._watch, self._end = outcomes, watch, end
        self.bonus = outcomes.bonus

    def ready(self) -> bool:
        return self._watch.now >= self._end

    def read(self) -> Any:
        self._watch.now = max(self._watch.now, self._end)
        return self._outcomes.read()
