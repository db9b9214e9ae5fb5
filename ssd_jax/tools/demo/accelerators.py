"""What recorded rounds would give on accelerators, by the stage times that `ssd-jax aot` predicts.

`accelerators.json` has these times, of one sequence, and says what made them
(`tests/tools/aot/stages.py`). A prediction is the number of recorded tokens over the time that
their rounds take by the formulas of `tuning.throughput`: AR's T_v(0) a token; SD's T_v(K) + K T_1
a round; SSD's max(T_v(K), n T_s(M)) a round, and K T_b more after a miss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

import msgspec

from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.tuning.throughput import Costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRounds:
    """Rounds of one mode, with K proposed tokens at most.

    Attributes:
      tokens: committed by all rounds.
      misses: rounds whose outcome no branch had been prepared for.
    """

    k: int
    tokens: int
    rounds: int
    misses: int = 0

    @classmethod
    def from_metrics(cls, answers: Iterable[Mapping[str, Any]], k: int) -> RecordedRounds:
        """The rounds of answers with these metrics (`engine.metrics`)."""
        tokens = rounds = misses = 0
        for metrics in answers:
            histogram = metrics["acceptance_histogram"] or []
            rounds += sum(histogram)
            tokens += sum(count * committed for committed, count in enumerate(histogram, start=1))
            misses += sum((metrics["miss_causes"] or {}).values())
        return cls(k=k, tokens=tokens, rounds=rounds, misses=misses)


class StageTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the parts of a round on one kind of chip.

    Attributes:
      target_devices: of the target, and of SD's draft; SSD's draft has one more.
      forward, verify: T_v of no and of K proposed tokens.
      draft, backup: T_1 of modes sd and ssd.
      branches: T_s.
    """

    target_devices: int
    forward: float
    verify: float
    draft: float
    backup: float
    branches: float

    def drafting_share(self, k: int) -> float:
        """The share of a round of mode sd that drafting K tokens takes: what ssd could hide."""
        return k * self.draft / (self.verify + k * self.draft)


class StoredTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `accelerators.json`: what was compiled, with what, and the times by chip.

    Attributes:
      command: prints such a file.
      versions: of the packages that it took.
      slots, context, k, branches: sizes of the programs.
    """

    command: str
    versions: dict[str, str]
    target: str
    draft: str
    slots: int
    context: int
    k: int
    branches: int
    chips: dict[str, StageTimes]


@functools.cache
def stored_times() -> StoredTimes:
    """The stage times of the package."""
    file = resources.files("ssd_jax.tools.demo") / "accelerators.json"
    return msgspec.json.decode(file.read_bytes(), type=StoredTimes)


def predict(
    times: StageTimes, sd: RecordedRounds, ssd: RecordedRounds, branches: int
) -> dict[str, float]:
    """Tokens per second of each mode.

    Args:
      sd, ssd: rounds that were recorded in these modes, with K up to that of the times.
      branches: M of the times.
    """
    plan = SpeculationPlan.of_branches(ssd.k, branches)
    costs = Costs(
        verify={0: times.forward, max(sd.k, ssd.k): times.verify}, step={branches: times.branches}
    )
    expansion = plan.forwards * times.branches
    seconds = ssd.rounds * costs.together(costs.verify_seconds(ssd.k), expansion)
    seconds += ssd.misses * ssd.k * times.backup
    return {
        "ar": 1 / costs.verify_seconds(0),
        "sd": sd.tokens / (sd.rounds * (costs.verify_seconds(sd.k) + sd.k * times.draft)),
        "ssd": ssd.tokens / seconds,
    }
