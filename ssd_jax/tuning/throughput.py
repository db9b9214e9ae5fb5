"""Predicts tokens per second of decoding in a mode, with K tokens a round and M branches.

If a verification of L tokens takes T_v(L) seconds, a token drafted just in time T_1 and a forward
of M branches T_s(M), a round commits E(L) = 1 + a_1 + a_1 a_2 + ... tokens, and

  AR      1 / T_v(0)
  SD      E(K) / (T_v(K) + K T_1 + T_h)
  SSD     [p_hit E_hit + (1 - p_hit) E_miss] / [p_hit T_hit + (1 - p_hit) (T_miss + T_b) + T_h]

where T_hit and T_miss are max(T_v, n T_s(M)) + x min(T_v, n T_s(M)): the n = K forwards (2 with
K = 1) of the branches run beside the verification. While both are busy each takes 1 + x times as
long as alone: x is 0 if they share nothing, and 1 if one waits for the other, as on a shared
device. T_b is K T_1 if a miss waits for the draft. T_h is the host's work, from an outcome to the
next dispatch; mode ar, which dispatches a round before it reads the last, hides it. This is Theorem
7 of the paper with seconds instead of ratios. p_hit follows from P(k), the fan-out's counts F_k and
the power law: F_k bonus tokens miss with probability c F_k^-r. Pure host code.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product, starmap
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta

from ssd_jax.roles.drafting import GAP_CLASSES, RANKS
from ssd_jax.speculation.acceptance import FIRST_GUESS, odds
from ssd_jax.speculation.fan_out import After, FanOut
from ssd_jax.speculation.tuner import SpeculationPlan

NotNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
_ByRank = Annotated[tuple[NotNegative, ...], Meta(min_length=RANKS, max_length=RANKS)]
_ByClass = Annotated[tuple[_ByRank, ...], Meta(min_length=GAP_CLASSES, max_length=GAP_CLASSES)]
_Table = Annotated[tuple[_ByClass, ...], Meta(min_length=2, max_length=2)]

MIN_SPEED_UP = 1.03
"""Times as fast as something simpler that a choice must be: predictions are no better than that."""
WORST_CONTENTION = 2.0
"""If more is measured, something else was busy, which a mode not chosen would never reveal."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds that the parts of a round take, for all slots of a batch together.

    Attributes:
      verify: T_v by number of proposed tokens, for the compiled widths.
      ahead: a round of mode ar, which dispatches the next round before it reads; 0 if not known.
      draft: T_1 of mode sd; 0 if drafting is free.
      rounds: whole rounds of mode sd by K, T_h included; empty if not known, and T_h counts as 0.
      trees: whole rounds of mode sd with trees of depth K, by nodes, of those that were tried.
      backup: T_1 where mode ssd's draft runs.
      step: T_s by M; empty without branches.
      contention: x, how much target and branches slow each other while both are busy.
      few: the same with the programs of the first slots alone, by their number; those that were
        there to be measured.
    """

    verify: Mapping[int, Annotated[float, Meta(gt=0)]]
    ahead: NotNegative = 0.0
    draft: NotNegative = 0.0
    rounds: Mapping[int, Annotated[float, Meta(gt=0)]] = dataclasses.field(default_factory=dict)
    trees: Mapping[int, Annotated[float, Meta(gt=0)]] = dataclasses.field(default_factory=dict)
    backup: NotNegative = 0.0
    step: Mapping[int, Annotated[float, Meta(gt=0)]] = dataclasses.field(default_factory=dict)
    contention: NotNegative = 0.0
    few: Mapping[int, Costs] = dataclasses.field(default_factory=dict)

    def verify_seconds(self, length: int) -> float:
        """T_v of proposals of `length` tokens, taken from the next width."""
        return self.verify[min(width for width in self.verify if width >= length)]

    @property
    def ar_round(self) -> float:
        """Seconds of a round of mode ar."""
        return self.ahead or self.verify_seconds(0)

    def sd_round(self, k: int) -> float:
        """Seconds of a round of mode sd with K tokens, from the next K that was measured."""
        measured_k = min((measured for measured in self.rounds if measured >= k), default=None)
        if measured_k is None:
            return self.verify_seconds(k) + k * self.draft
        least = min(self.verify_seconds(k), self.rounds[measured_k])
        return max(self.rounds[measured_k] - (measured_k - k) * self.draft, least)

    @property
    def host(self) -> float:
        """T_h: what the shortest round of mode sd takes beside its draft and its verification."""
        if not self.rounds:
            return 0.0
        k = min(self.rounds)
        return max(self.rounds[k] - self.verify_seconds(k) - k * self.draft, 0.0)

    def ssd_round(self, plan: SpeculationPlan, length: int, num_backup: int = 0) -> float:
        """Seconds of a round of mode ssd.

        Args:
          length: L of the verification.
          num_backup: tokens that were drafted just in time before it.
        """
        branches = plan.forwards * self.step[plan.budget]
        seconds = self.overlapped(self.verify_seconds(length), branches)
        return seconds + num_backup * self.backup + self.host

    def overlapped(self, verification: float, branches: float) -> float:
        """Seconds of a verification and of branches that begin at the same time."""
        shorter, longer = sorted((verification, branches))
        return longer + self.contention * shorter

    def with_observed_steps(self, steps: Mapping[int, float]) -> Costs:
        """Costs with T_s as observed, assuming that the target was busy all the time; an M that was
        not run lately is slower by the same factor."""
        separate = {m: seconds / (1 + self.contention) for m, seconds in steps.items()}
        factors = [separate[m] / self.step[m] for m in self.step if m in separate]
        factor = float(np.mean(factors)) if factors else 1.0
        step = {m: separate.get(m, factor * seconds) for m, seconds in self.step.items()}
        return dataclasses.replace(self, step=step)


def contention(verification: float, branches: float, overlapped: float) -> float:
    """x, from the seconds that both take alone and that they take when begun at once."""
    shorter, longer = sorted((verification, branches))
    return min(max(overlapped - longer, 0.0) / shorter, WORST_CONTENTION)


class Observations(Protocol):
    """Observations of target and draft."""

    @property
    def r(self) -> float:
        """Exponent of the power law."""
        ...

    @property
    def single_miss(self) -> float:
        """c of the power law: how often a single prepared bonus token misses."""
        ...

    def rates(self, length: int, after: After) -> list[float]:
        """a_1..a_L: how often the token at each place is accepted once it is judged."""
        ...


class RankTables(NamedTuple):
    """`rank_rates.RankCounts` as a file has them."""

    taken: _Table
    visited: _Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Guess:
    """Assumption before any observation: all places have the same acceptance.

    Attributes:
      judged: number of proposed tokens at earlier starts that it was learned from.
      stated: number of tokens that an acceptance which was measured elsewhere counts for besides.
      ranks: what trees of earlier starts have shown; None before any.
    """

    acceptance: Fraction = FIRST_GUESS
    single_miss: Fraction = 0.5
    r: Annotated[float, Meta(ge=0, le=9)] = 1.0
    judged: Annotated[int, Meta(ge=0, le=2**62)] = 0
    stated: Annotated[int, Meta(ge=0, le=2**62)] = 0
    ranks: RankTables | None = None

    def rates(self, length: int, after: After) -> list[float]:
        """The same acceptance at each place [L]."""
        return [self.acceptance] * length


def tokens(rates: Iterable[float]) -> float:
    """E: expected tokens of a round at these acceptance rates, bonus included."""
    total = prob = 1.0
    for a in rates:
        prob *= a
        total += prob
    return total


def miss_rate(count: int, observations: Observations) -> float:
    """How often none of `count` prepared bonus tokens is the actual one."""
    return min(observations.single_miss * count**-observations.r, 1.0) if count else 1.0


def ar(costs: Costs, *, rows: int = 1) -> float:
    """Tokens per second of `rows` sequences without a draft."""
    return rows / costs.ar_round


def sd(costs: Costs, observations: Observations, plan: SpeculationPlan, *, rows: int = 1) -> float:
    """Tokens per second with proposals drafted before every verification."""
    return rows * tokens(observations.rates(plan.k, "miss")) / costs.sd_round(plan.k)


def ssd(
    costs: Costs,
    observations: Observations,
    plan: SpeculationPlan,
    fan_out: FanOut,
    *,
    waits: bool,
    rows: int = 1,
) -> float:
    """Tokens per second with branches.

    Rounds are of three kinds, by what they verify: a branch of k < L (K tokens), a branch of k = L
    (which starts a forward later, by the tail rule: K - 1 tokens), and the backup. Each kind has
    its chances of being followed by the others; the rate is that of the long run. A batch waits for
    the backup as soon as one of its rows has missed.

    Args:
      fan_out: divides the budget.
      waits: whether a miss waits for K drafted tokens; else it proposes nothing.
      rows: sequences that are decoded together.
    """
    k, forwards = plan.k, plan.forwards
    kinds: tuple[tuple[int, After], ...] = (
        (k, "hit"),
        (min(forwards - 1, k), "hit"),
        (k if waits else 0, "miss"),
    )
    transitions = [
        _transition(observations, fan_out, length, plan.budget, after) for length, after in kinds
    ]
    frequencies = _stationary(np.array(transitions))
    total = float(frequencies @ [costs.ssd_round(plan, length) for length, _ in kinds])
    if waits:
        total += (1 - (1 - frequencies[2]) ** rows) * k * costs.backup
    round_tokens = [tokens(observations.rates(length, after)) for length, after in kinds]
    return rows * float(frequencies @ round_tokens) / total


def hit_rate(
    observations: Observations, fan_out: FanOut, length: int, budget: int, after: After
) -> float:
    """How often an outcome of a verification of L tokens was prepared for."""
    early, full, _ = _transition(observations, fan_out, length, budget, after)
    return early + full


def _transition(
    observations: Observations, fan_out: FanOut, length: int, budget: int, after: After
) -> tuple[float, float, float]:
    """Chances that a round is followed by a hit of k < L, a hit of k = L, and a miss."""
    chances = odds(observations.rates(length, after))
    counts = fan_out.counts(length, budget, after)
    hits = [
        p * (1 - miss_rate(count, observations)) for p, count in zip(chances, counts, strict=True)
    ]
    early, full = sum(hits[:-1]), hits[-1]
    return early, full, 1 - early - full


def _stationary(transitions: np.ndarray) -> np.ndarray:
    """Long-run frequency of each kind of round, from the chances [kinds, kinds]."""
    size = len(transitions)
    # pi (P - 1) = 0 has one redundant equation, which sum(pi) = 1 replaces.
    equations = (transitions - np.eye(size)).T
    equations[0] = 1.0
    return np.linalg.solve(equations, np.eye(size)[0])


class Prediction(NamedTuple):
    """A plan (K = 0 without a draft), and its tokens per second."""

    plan: SpeculationPlan
    rate: float

    def __str__(self) -> str:
        k, budget = self.plan.k, self.plan.budget
        options = f" with k = {k}" if k else ""
        return f"{self.rate:.1f}{options}" + (f", budget = {budget}" if budget else "")


def best_sd(
    costs: Costs, observations: Observations, ks: Sequence[int], *, rows: int = 1
) -> Prediction:
    """The fastest K of mode sd; of equally fast ones, the smallest."""
    plans = [SpeculationPlan(k=k) for k in sorted(ks)]
    return _fastest(Prediction(plan, sd(costs, observations, plan, rows=rows)) for plan in plans)


def best_ssd(
    costs: Costs,
    observations: Observations,
    fan_out: FanOut,
    *,
    ks: Sequence[int],
    budgets: Sequence[int],
    waits: Sequence[bool],
    rows: int = 1,
) -> Prediction:
    """The fastest K and M of mode ssd; of equally fast ones, the smallest.

    Args:
      waits: what a miss may do; of several, the fastest is taken.
    """
    return _fastest(
        Prediction(plan, ssd(costs, observations, plan, fan_out, waits=waits_for_draft, rows=rows))
        for plan in starmap(SpeculationPlan.of_branches, product(sorted(ks), sorted(budgets)))
        for waits_for_draft in waits
    )


def least_acceptance(pays: Callable[[float], bool]) -> float | None:
    """The least acceptance, in hundredths, at which speculation pays; None where it does at none.

    Args:
      pays: whether it does at an acceptance; where it does, it does at all higher ones.
    """
    percent = bisect.bisect_left(range(101), True, key=lambda percent: pays(percent / 100))
    return None if percent > 100 else percent / 100


def _fastest(candidates: Iterable[Prediction]) -> Prediction:
    return max(candidates, key=lambda prediction: prediction.rate)  # the first of equals
