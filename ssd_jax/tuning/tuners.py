"""Tuners that choose the fastest K and M from costs and observations. Pure host code."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from ssd_jax.roles.drafting import RANKS, TreeShape
from ssd_jax.speculation.acceptance import WEIGHT, AcceptanceEstimator, smoothed
from ssd_jax.speculation.fan_out import After, FanOut, MeasuredFanOut, VerificationStats
from ssd_jax.speculation.rank_rates import RankCounts, RankRates
from ssd_jax.speculation.tuner import SpeculationPlan, Steps, Tuner
from ssd_jax.tuning.throughput import (
    Costs,
    Guess,
    Observations,
    Prediction,
    RankTables,
    best_sd,
    best_ssd,
)

_PLAN_INTERVAL = 16  # rounds between two choices
_MAX_EARLIER = 2048  # most judged tokens of earlier starts that count, so that changes are learned
_RECENT_ROUNDS = 64  # rounds for which the observed times of an M remain valid


class UpdatedGuess(Observations):
    """Observations that begin as a guess, updated by the verifications observed since.

    Args:
      guess: the prior assumption; worth 8 observations of each kind.
    """

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._measured = MeasuredFanOut(acceptance=guess.acceptance, r=guess.r)
        self._all = AcceptanceEstimator()
        self._num_misses = 0
        self._lookups: Counter[int] = Counter()  # by the number of prepared bonus tokens
        self._rank_rates: list[RankRates] = []

    @property
    @override
    def r(self) -> float:
        return self._measured.r

    @property
    @override
    def single_miss(self) -> float:
        # Misses over those of the power law with c = 1.
        r = self.r
        expected_misses = sum(
            count * num_prepared**-r for num_prepared, count in self._lookups.items()
        )
        return smoothed(self._num_misses, expected_misses, self._guess.single_miss)

    @override
    def rates(self, length: int, after: After) -> list[float]:
        return self._measured.rates(length, after)

    def observe(self, verified: VerificationStats) -> None:
        """Learns from a verification. If nothing was proposed, there is no acceptance to learn."""
        self._measured.observe(verified)
        self._all.observe(verified.accepted, [None] * verified.length)
        if verified.prepared:
            self._num_misses += verified.rank is None
            self._lookups[verified.prepared] += 1

    def rank_rates(self, shape: TreeShape) -> RankRates:
        """Rates for trees, from what those of earlier starts have shown; they learn."""
        rates = RankRates(shape, self._earlier_ranks)
        self._rank_rates.append(rates)
        return rates

    @property
    def _earlier_ranks(self) -> RankCounts | None:
        tables = self._guess.ranks
        return None if tables is None else RankCounts(*(np.array(table) for table in tables))

    @property
    def guess(self) -> Guess:
        """What to assume at the next start, from the texts of this one and of those before."""
        accepted, judged, guess = self._all.accepted.total(), self._all.judged.total(), self._guess
        ranks = guess.ranks
        for rates in self._rank_rates:
            counts = rates.counts
            # The best continuations are the tokens that a chain would have had.
            accepted += int(counts.taken[..., 0].sum())
            judged += int(counts.visited[..., 0].sum())
        if any(rates.counts.visited.any() for rates in self._rank_rates):
            earlier = self._earlier_ranks or RankCounts.none(RANKS)
            total = functools.reduce(
                RankCounts.plus, (rates.counts for rates in self._rank_rates), earlier
            ).recent(_MAX_EARLIER)
            ranks = RankTables(*(_as_table(array) for array in total))
        prior_weight = max(min(guess.judged, _MAX_EARLIER), WEIGHT)
        new_weight = judged / (judged + prior_weight)
        return Guess(
            acceptance=smoothed(accepted, judged, guess.acceptance, prior_weight + guess.stated),
            single_miss=min(
                (1 - new_weight) * guess.single_miss + new_weight * self.single_miss, 1.0
            ),
            r=(1 - new_weight) * guess.r + new_weight * self.r,
            judged=guess.judged + judged,
            stated=guess.stated,
            ranks=ranks,
        )


def _as_table(array: np.ndarray) -> Any:
    return tuple(tuple(tuple(row) for row in rows) for rows in array.tolist())


class FastestTuner(Tuner):
    """Chooses the fastest K of mode sd, or K and M of mode ssd, with recent values of T_s.

    Args:
      costs: measured at the start, of all slots.
      observations: what is known about acceptance; this tuner updates it.
      ks: the values of K to choose from.
      fan_out: of mode ssd, a policy like those of the sequences; it learns from all that teach.
      budgets: of mode ssd, the values of M to choose from.
      waits: see `throughput.best_ssd`.

    Attributes:
      costs: of the batch size that rounds have now.
    """

    def __init__(
        self,
        costs: Costs,
        observations: UpdatedGuess,
        *,
        ks: Sequence[int],
        fan_out: FanOut | None = None,
        budgets: Sequence[int] = (),
        waits: Sequence[bool] = (),
    ) -> None:
        self.costs, self._observations, self._fan_out = costs, observations, fan_out
        self._ks, self._budgets, self._waits = ks, budgets, waits
        self._rounds, self._plan = 0, SpeculationPlan(k=max(ks))
        self._last_planned: dict[int, int] = {}  # by M, the last round with it

    def best(self, rows: int, steps: Mapping[int, float] | None = None) -> Prediction:
        """The fastest plan.

        Args:
          rows: sequences that are decoded together.
          steps: T_s by M, as far as it was observed. It counts only if M was planned recently: for
            other M it may be outdated.
        """
        if self._fan_out is None:
            return best_sd(self.costs, self._observations, self._ks, rows=rows)
        oldest = self._rounds - _RECENT_ROUNDS
        recent = {m for m, last_round in self._last_planned.items() if last_round >= oldest}
        return best_ssd(
            self.costs.with_observed_steps({m: t for m, t in (steps or {}).items() if m in recent}),
            self._observations,
            self._fan_out,
            ks=self._ks,
            budgets=self._budgets,
            waits=self._waits,
            rows=rows,
        )

    def seconds(self, length: int, *, missed: bool) -> float | None:
        """Seconds of a round of the plan under way that verifies L tokens; None if not known.

        Args:
          missed: no branch was ready, and what was proposed was drafted just in time.
        """
        if self._fan_out is not None:
            return self.costs.ssd_round(self._plan, length, length if missed else 0)
        return self.costs.sd_round(length) if length else None

    @override
    def plan(self, *, rows: int, steps: Steps) -> SpeculationPlan:
        if self._rounds % _PLAN_INTERVAL == 0:
            self._plan = self.best(max(rows, 1), steps()).plan
        self._last_planned[self._plan.budget] = self._rounds
        self._rounds += 1
        return self._plan

    @override
    def observe(self, verified: VerificationStats) -> None:
        self._observations.observe(verified)
        if self._fan_out is not None:
            self._fan_out.observe(verified)
