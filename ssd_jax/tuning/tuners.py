"""Tuners that choose the fastest K and M from costs and observations. Pure host code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ssd_jax.speculation.acceptance import WEIGHT, AcceptanceEstimator, weighed
from ssd_jax.speculation.fan_out import After, FanOut, MeasuredFanOut, VerificationStats
from ssd_jax.speculation.tuner import SpeculationPlan, Steps, Tuner
from ssd_jax.tuning.throughput import Costs, Guess, Predicted, best_sd, best_ssd

_EVERY = 16  # rounds between two choices
_REMEMBERED = 2048  # most judged tokens of earlier starts that count, so that changes are learned
_LATELY = 64  # rounds for which the observed times of an M remain valid


class Observed:
    """See `throughput.Observations`: a guess, updated by the verifications observed since.

    Args:
      guess: the prior assumption; worth 8 observations of each kind.
    """

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self._measured = MeasuredFanOut(acceptance=guess.acceptance, r=guess.r)
        self._all = AcceptanceEstimator()
        self._missed = 0
        self._looked: Counter[int] = Counter()  # by the number of prepared bonus tokens

    @property
    def r(self) -> float:
        """See `throughput.Observations.r`."""
        return self._measured.r

    @property
    def alone(self) -> float:
        """See `throughput.Observations.alone`: misses over those of the power law with c = 1."""
        r = self.r
        expected = sum(count * prepared**-r for prepared, count in self._looked.items())
        return weighed(self._missed, expected, self._guess.alone)

    def rates(self, length: int, after: After) -> list[float]:
        """See `throughput.Observations.rates`."""
        return self._measured.rates(length, after)

    def observe(self, verified: VerificationStats) -> None:
        """Learns from a verification. If nothing was proposed, there is no acceptance to learn."""
        self._measured.observe(verified)
        self._all.observe(verified.accepted, [None] * verified.length)
        if verified.prepared:
            self._missed += verified.rank is None
            self._looked[verified.prepared] += 1

    @property
    def guess(self) -> Guess:
        """What to assume at the next start, from the texts of this one and of those before."""
        accepted, judged, guess = self._all.accepted.total(), self._all.judged.total(), self._guess
        before = max(min(guess.judged, _REMEMBERED), WEIGHT)
        new = judged / (judged + before)
        return Guess(
            acceptance=weighed(accepted, judged, guess.acceptance, before + guess.stated),
            alone=min((1 - new) * guess.alone + new * self.alone, 1.0),
            r=(1 - new) * guess.r + new * self.r,
            judged=guess.judged + judged,
            stated=guess.stated,
        )


class FastestTuner(Tuner):
    """See `Tuner`: the fastest K of mode sd, or K and M of mode ssd, with recent values of T_s.

    Args:
      costs: measured at the start.
      seen: what is known about acceptance; this tuner updates it.
      ks: the values of K to choose from.
      fan_out: of mode ssd, a policy like those of the sequences; it learns from all that teach.
      budgets: of mode ssd, the values of M to choose from.
      waits: see `throughput.best_ssd`.
    """

    def __init__(
        self,
        costs: Costs,
        seen: Observed,
        *,
        ks: Sequence[int],
        fan_out: FanOut | None = None,
        budgets: Sequence[int] = (),
        waits: Sequence[bool] = (),
    ) -> None:
        self._costs, self._seen, self._fan_out = costs, seen, fan_out
        self._ks, self._budgets, self._waits = ks, budgets, waits
        self._rounds, self._plan = 0, SpeculationPlan(k=max(ks))
        self._planned: dict[int, int] = {}  # by M, the last round with it

    def best(self, rows: int, steps: Mapping[int, float] | None = None) -> Predicted:
        """The fastest plan.

        Args:
          rows: sequences that are decoded together.
          steps: T_s by M, as far as it was observed. It counts only if M was planned recently: for
            other M it may be outdated.
        """
        if self._fan_out is None:
            return best_sd(self._costs, self._seen, self._ks, rows=rows)
        since = self._rounds - _LATELY
        lately = {m for m, planned in self._planned.items() if planned >= since}
        return best_ssd(
            self._costs.observed({m: t for m, t in (steps or {}).items() if m in lately}),
            self._seen,
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
            return self._costs.ssd_round(self._plan, length, length if missed else 0)
        return self._costs.sd_round(length) if length else None

    def plan(self, *, rows: int, steps: Steps) -> SpeculationPlan:
        """See `Tuner.plan`."""
        if self._rounds % _EVERY == 0:
            self._plan = self.best(max(rows, 1), steps()).plan
        self._planned[self._plan.budget] = self._rounds
        self._rounds += 1
        return self._plan

    def observe(self, verified: VerificationStats) -> None:
        """See `Tuner.observe`."""
        self._seen.observe(verified)
        if self._fan_out is not None:
            self._fan_out.observe(verified)
