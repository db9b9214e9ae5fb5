"""Tuners that choose without a reason."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssd_jax.speculation.fan_out import VerificationStats
from ssd_jax.speculation.tuner import SpeculationPlan


class Restless:
    """Another K and M each round, at random; `plans` are those it gave, `seen` what it was told."""

    def __init__(self, ks: Sequence[int], budgets: Sequence[int], seed: int = 0) -> None:
        self._ks, self._budgets = list(ks), list(budgets)
        self._rng = np.random.default_rng(seed)
        self.plans: list[SpeculationPlan] = []
        self.seen: list[VerificationStats] = []

    def plan(self, *, rows, steps) -> SpeculationPlan:
        steps()
        k, budget = (int(self._rng.choice(choices)) for choices in (self._ks, self._budgets))
        self.plans.append(SpeculationPlan.of_branches(k, budget))
        return self.plans[-1]

    def observe(self, verified: VerificationStats) -> None:
        self.seen.append(verified)
