"""Whether known costs still hold: by a short measurement at each start, and by rounds that follow.

Costs that were measured beside other work must not serve for ever, and other work must not spoil
good ones for ever. So a start that contradicts the known costs by a quarter measures them again,
all of them, since a mode that does not run shows nothing of its own. Faster costs are taken at
once: whatever disturbs only adds to times. Slower ones are taken if the known ones were in doubt
already, since the start before, or the rounds of its texts, had contradicted them, too; else the
known ones serve once more, in doubt. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from statistics import geometric_mean, median

from ssd_jax.tuning.cost_file import KnownCosts
from ssd_jax.tuning.throughput import Costs

OFF = 1.25
"""A prediction is off if it differs from what was measured by this factor, or by more."""

_MIN_ROUNDS = 32  # of a mode, to judge it by
_MAX_ROUNDS = 512  # latest ones that count


def review_costs(
    known: KnownCosts, *, check: Callable[[], Costs], measure: Callable[[], Costs]
) -> KnownCosts:
    """The costs for this start.

    Args:
      check: measures the costs of the target alone.
      measure: measures all costs.
    """
    if not known.doubted and not _contradict(known.costs, check()):
        return known
    costs = measure()
    slower = _target_seconds(costs) / _target_seconds(known.costs)
    if slower > 1 and not known.doubted:
        return dataclasses.replace(known, doubted=True)
    # What rounds were seen to take remains.
    slowness = None if known.slowness is None else known.slowness / slower
    return KnownCosts(costs, known.guess, slowness)


def correct_costs(known: KnownCosts, slowness: Mapping[str, float]) -> KnownCosts:
    """The costs, corrected by what rounds took.

    All costs are corrected alike: what a mode that did not run would have taken is not known, and
    no mode may look better or worse because another one ran.

    Args:
      slowness: observed seconds over those of the costs, by the modes that ran.
    """
    if not slowness:
        return known
    expected = known.slowness or 1.0
    doubted = any(_is_off(ratio / expected) for ratio in slowness.values())
    mean = geometric_mean(slowness.values())
    return dataclasses.replace(known, slowness=mean, doubted=doubted)


class RoundTimes:
    """Seconds of rounds over those that were expected, by mode."""

    def __init__(self) -> None:
        self._ratios: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_MAX_ROUNDS)
        )

    def observe(self, mode: str, seconds: float, expected: float) -> None:
        """Takes a round."""
        self._ratios[mode].append(seconds / expected)

    @property
    def slowness(self) -> dict[str, float]:
        """The median by mode, of modes with enough rounds."""
        return {
            mode: median(ratios)
            for mode, ratios in self._ratios.items()
            if len(ratios) >= _MIN_ROUNDS
        }


def _contradict(known: Costs, measured: Costs) -> bool:
    pairs = [(known.ar_round, measured.ar_round)]
    pairs += [(seconds, measured.verify[width]) for width, seconds in known.verify.items()]
    return any(_is_off(new / old) for old, new in pairs)


def _is_off(factor: float) -> bool:
    return not 1 / OFF < factor < OFF


def _target_seconds(costs: Costs) -> float:
    return costs.ar_round + sum(costs.verify.values())
