"""Chooses the mode of `auto` once, by measured costs, and makes the tuners of K and M."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_K, MODES
from ssd_jax.engine.planner import RoundPlan
from ssd_jax.engine.rounds.timer import RoundTimer, TimedRound
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.speculation.tree_tokens import chain_tokens, tree_tokens
from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.tuning.batch_costs import costs_of_batch
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.goodput import GoodputPlanner
from ssd_jax.tuning.review import RoundTimes, correct_costs
from ssd_jax.tuning.throughput import (
    MIN_SPEED_UP,
    Costs,
    Guess,
    Prediction,
    ar,
    least_acceptance,
)
from ssd_jax.tuning.tree_choice import TreeChoice, choose
from ssd_jax.tuning.tuners import FastestTuner, UpdatedGuess


class Chooser:
    """Chooses a mode once, and gives engines the tuners that choose K and M while they decode.

    Args:
      budgets: values of M to choose among.
      known: costs, and observations of earlier starts.
      file: stores observations.
      fan_out: makes a policy for K = k; None makes the configured one.
      shares_branches: whether several drafts share the branches of a sequence.

    Attributes:
      predicted: by mode that auto may choose, the fastest plan with all slots busy, as fast as
        rounds of earlier starts were.
      mode: as configured; for auto, the last mode that beats all before it by enough.
    """

    def __init__(
        self,
        config: Config,
        known: KnownCosts,
        *,
        budgets: tuple[int, ...],
        file: CostFile,
        fan_out: Callable[[int], FanOut] | None = None,
        shares_branches: bool = False,
    ) -> None:
        self._config, self._known_costs, self._file = config, known, file
        self._shares_branches = shares_branches
        self._budgets = budgets
        self._fan_out = fan_out or partial(config.fan_out_of, branches=max(budgets, default=0))
        self._guess = known.guess
        self._observations, self._times = UpdatedGuess(known.guess), RoundTimes()
        self._final: tuple[Guess, dict[str, float]] | None = None
        self._tuners: dict[tuple[str, int], FastestTuner] = {}
        self._planners: dict[tuple[str, int], GoodputPlanner] = {}
        self._tree: TreeChoice | None = None
        self.mode, predicted = self._fastest(config.slots)
        if config.mode != "auto":
            self.mode = config.mode
        slowness = known.slowness or 1.0
        self.predicted = {
            mode: Prediction(plan, rate / slowness) for mode, (plan, rate) in predicted.items()
        }

    @property
    def costs(self) -> Costs:
        """Costs as they were measured."""
        return self._known_costs.costs

    @property
    def line(self) -> str:
        """A line about what was chosen, and why."""
        if self._tree is not None:
            return self._tree.line(self._config.speculated, self._guess.acceptance)
        rates = "; ".join(f"{mode} {prediction}" for mode, prediction in self.predicted.items())
        fastest = max(self.predicted, key=lambda mode: self.predicted[mode].rate)
        near = ""
        if fastest != self.mode:
            near = f"; {fastest} is less than {MIN_SPEED_UP - 1:.0%} faster than a simpler mode"
        return (
            f"mode auto takes {self.mode}: predicted tokens/s are {rates} "
            f"(an acceptance of {self._guess.acceptance:.2f}{self._least}{near})"
        )

    @property
    def _least(self) -> str:
        """From which acceptance on a draft pays, and what a verification costs."""
        others = [mode for mode in self.predicted if mode != "ar"]
        if not others:
            return ""
        rows, costs = self._config.slots, self.costs
        enough = MIN_SPEED_UP * ar(costs, rows=rows)

        def pays(acceptance: float) -> bool:
            guess = UpdatedGuess(dataclasses.replace(self._guess, acceptance=acceptance))
            return any(self._best(mode, costs, rows, guess).rate > enough for mode in others)

        least, k = least_acceptance(pays), max(self.predicted[mode].plan.k for mode in others)
        times = costs.verify_seconds(k) / costs.verify_seconds(0)
        return (
            f"; a draft pays {'at none' if least is None else f'from {least:.2f} on'}, and "
            f"verifying {k} tokens takes {times:.2f} times as long as a forward of one"
        )

    def _fastest(self, rows: int) -> tuple[str, dict[str, Prediction]]:
        """The last of the modes that auto chooses among that beats all before it by enough, with
        so many slots busy, and the fastest plan of each."""
        config, costs = self._config, self._costs_of(rows)
        mode, predicted = "ar", {"ar": Prediction(SpeculationPlan(k=0), ar(costs, rows=rows))}
        for other in self._modes[1:] if config.mode == "auto" else ():
            prediction = self._best(other, costs, rows, self._observations)
            if prediction.rate > MIN_SPEED_UP * max(slower.rate for slower in predicted.values()):
                mode = other
            predicted[other] = prediction
        return mode, predicted

    def _best(self, mode: str, costs: Costs, rows: int, observations: UpdatedGuess) -> Prediction:
        """The fastest plan of a mode, by such costs and observations."""
        tuner = self._new_tuner(mode, self._config.speculated, observations)
        tuner.costs = costs
        return tuner.best(rows)

    @property
    def _modes(self) -> tuple[str, ...]:
        """Modes that rounds may be of.

        Drafts that share the branches of a sequence do not see tokens that one of them drafts.
        """
        modes = MODES[: MODES.index(self._config.prepared) + 1]
        return tuple(mode for mode in modes if mode != "sd" or not self._shares_branches)

    def _costs_of(self, batch: int) -> Costs:
        return costs_of_batch(self.costs, batch, self._config.slots)

    def tuner(self, mode: str, k: int) -> FastestTuner:
        """The tuner of an engine of mode sd or ssd with up to k proposed tokens."""
        tuner = self._tuners[mode, k] = self._new_tuner(mode, k, self._observations)
        return tuner

    def _new_tuner(self, mode: str, k: int, observations: UpdatedGuess) -> FastestTuner:
        config = self._config
        ks = range(1, AUTO_K + 1) if config.chooses_k and k == config.speculated else (k,)
        if mode == "sd":
            return FastestTuner(self.costs, observations, ks=ks)
        kind = config.backup_kind
        return FastestTuner(
            self.costs,
            observations,
            ks=ks,
            fan_out=self._fan_out(k),
            budgets=self._budgets,
            waits=(True, False) if kind == "auto" else (kind == "draft",),
        )

    def choose_tree(self, nodes: Sequence[int], measure: Callable[[int], float | None]) -> int:
        """Chooses the chain or a tree of mode sd, whose engines are not made yet.

        Args:
          nodes: to choose from, beside the chain.
          measure: see `tree_choice.choose`.

        Returns: nodes of the tree; 0 is the chain.
        """
        k, acceptance, costs = self._config.speculated, self._guess.acceptance, self.costs
        tokens = {0: chain_tokens(acceptance, k)}
        for count in nodes:
            shape = TreeShape(nodes=count, depth=k)
            rates = UpdatedGuess(self._guess).rank_rates(shape).by_class
            tokens[count] = tree_tokens(rates, acceptance, shape)
        self._tree = tree = choose(costs, k, tokens, measure, rows=self._config.slots)
        if tree.costs != costs:
            self._known_costs = dataclasses.replace(self._known_costs, costs=tree.costs)
            self._store(self._guess)
        return tree.nodes

    def take_chain(self, reason: str) -> None:
        """Takes the chain without a comparison."""
        self._tree = TreeChoice(0, {}, self.costs, reason)

    def rank_rates(self, shape: TreeShape) -> RankRates:
        """Rates for the trees of an engine."""
        return self._observations.rank_rates(shape)

    def timer(self, mode: str, k: int) -> RoundTimer:
        """Compares the rounds of an engine, whose roles are made, with its costs."""
        tuner, planner = self._tuners.get((mode, k)), self._planners.get((mode, k))

        def observe_round(round_: TimedRound) -> None:
            if planner is not None:
                planner.observe(round_)
            if tuner is not None:
                tuner.costs = self._costs_of(round_.batch)
            if round_.rows < self._config.slots:
                return
            expected, name = None, mode
            if round_.mode == "ar":
                expected, name = self.costs.ar_round, "ar"
            elif round_.mode != mode:
                return
            elif self._tree is not None and self._tree.nodes:
                expected = self.costs.trees[self._tree.nodes]
            elif tuner is not None:
                expected = tuner.seconds(round_.proposed, missed=round_.missed)
            # Of sampled rows whose text depends on what is proposed, times may not choose that.
            if self._tree is not None and RULES[self._config.verify].timed:
                expected = None
            if expected is not None:
                self._times.observe(name, round_.seconds, expected)

        return RoundTimer(observe_round)

    def planner(self, mode: str, k: int) -> GoodputPlanner | None:
        """Decides how rounds of an engine speculate; None where that was not left open."""
        if self._config.mode != "auto":
            return None
        plans = [RoundPlan(0), RoundPlan(k, branches=False), RoundPlan(k)]
        plans = [plan for plan in plans if plan.mode in self._modes]

        def first(slots: int) -> int:
            few = slots < self._config.slots
            chosen = self._fastest(slots)[0] if few else self.mode
            return next(number for number, plan in enumerate(plans) if plan.mode == chosen)

        planner = GoodputPlanner(plans, timed=RULES[self._config.verify].timed, first=first)
        self._planners[mode, k] = planner
        return planner

    def freeze_observations(self) -> None:
        """Excludes later observations from what is kept for the next start.

        Beside sampled rows of a timed rule, even observations of greedy rows depend on the
        noise of the sampled ones, through timing, and a request of another process may have the
        same noise.
        """
        self._final = self._observations.guess, self._times.slowness

    def close(self) -> None:
        """Stores the observations for the next start."""
        guess, slowness = self._final or (self._observations.guess, self._times.slowness)
        if guess.judged > self._guess.judged or slowness:
            self._known_costs = correct_costs(self._known_costs, slowness)
            self._store(guess)

    def _store(self, guess: Guess) -> None:
        """Writes the costs with this guess, or with a stored one that has seen more.

        Costs that another process has measured meanwhile stay.
        """
        known, costs = self._known_costs, self.costs
        stored = self._file.read(widths=tuple(costs.verify), budgets=tuple(costs.step))
        if stored is not None and stored.guess.judged > guess.judged:
            guess = stored.guess
        if stored is not None and stored.costs.verify != costs.verify:
            known = stored
        self._file.write(dataclasses.replace(known, guess=guess))
