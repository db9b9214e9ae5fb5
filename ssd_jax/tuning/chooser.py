"""What is chosen by measured costs: the mode, K and M of `auto`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ssd_jax.checkpoints.cache_dir import costs_cache
from ssd_jax.config import AUTO_K, Config
from ssd_jax.environment import cpu_affinity, cpu_model, versions
from ssd_jax.speculation.tuner import SpeculationPlan, Tuner
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.measuring import PATIENCE, Branches, Verifications, measure_drafter
from ssd_jax.tuning.throughput import Costs, Guess, ar, best_sd, best_ssd, contention
from ssd_jax.tuning.tuners import Observed, SdTuner, SsdTuner

if TYPE_CHECKING:
    from ssd_jax.loaded import Loaded
    from ssd_jax.opened import OpenedModel

_NGRAM = Guess(acceptance=0.4)
"""Most rounds of n-grams have nothing to propose, and count as rejected."""
_ENOUGH = 1.05  # times as fast as a simpler mode; what the host does is not in the predictions
_NO_COST = ("trace", "compile_cache", "chat_template")


class Predicted(NamedTuple):
    """Tokens per second of a mode, all slots busy, and how it would reach them."""

    rate: float
    plan: SpeculationPlan | None = None

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.rate:.1f}"
        budget = f", budget = {self.plan.budget}" if self.plan.budget else ""
        return f"{self.rate:.1f} with k = {self.plan.k}{budget}"


class Chooser:
    """Chooses a mode once, and gives engines what chooses K and M while they decode.

    Args:
      config: settings.
      known: costs, and what was observed at earlier starts.
      file: remembers what is observed.
      drafting: measures T_1 of mode sd, see `Costs.draft`, for a model of mode ssd that is asked
        for sd: few ever are, and it may take a second copy of the draft.
    """

    def __init__(
        self,
        config: Config,
        known: KnownCosts,
        *,
        file: CostFile | None = None,
        drafting: Callable[[], float] | None = None,
    ) -> None:
        self._config, self._costs, self._file = config, known.costs, file
        self._guess, self._drafting = known.guess, drafting
        self._seen = Observed(known.guess)
        self._settled: Guess | None = None
        self.predicted = self._predict()
        self.mode = self._fastest() if config.mode == "auto" else config.mode

    @property
    def line(self) -> str:
        """Says what was chosen, and why."""
        each = "; ".join(f"{mode} {predicted}" for mode, predicted in self.predicted.items())
        return (
            f"mode auto takes {self.mode}: predicted tokens/s are {each} "
            f"(an acceptance of {self._guess.acceptance:.2f})"
        )

    def tuner(self, mode: str, k: int) -> Tuner:
        """Of an engine of mode sd or ssd with up to k proposed tokens."""
        ks = self._ks(k)
        if mode == "sd":
            return SdTuner(self._with_draft(), self._seen, ks=ks)
        return SsdTuner(
            self._costs,
            self._seen,
            self._config.fan_out_of(k),
            ks=ks,
            budgets=self._config.budgets,
            waits=self._waits,
        )

    def settle(self) -> None:
        """What is observed from now on is kept for no other start.

        Beside sampled rows under the ratio rule, even what greedy rows show depends on the noise of
        those, through time, and a request of another process may have the same noise.
        """
        self._settled = self._seen.guess

    def remember(self) -> None:
        """Keeps what was observed for the next start."""
        guess = self._settled or self._seen.guess
        if self._file is not None and guess.judged > self._guess.judged:
            self._file.write(KnownCosts(self._costs, guess))

    def _with_draft(self) -> Costs:
        """Costs with T_1 of mode sd, which is measured where it is not known yet."""
        if self._drafting is not None and not self._costs.draft:
            self._costs = dataclasses.replace(self._costs, draft=self._drafting())
            if self._file is not None:
                self._file.write(KnownCosts(self._costs, self._guess))
        return self._costs

    def _fastest(self) -> str:
        """Of ar, sd, ssd the first that none behind it beats by enough."""
        best = "ar"
        for mode, predicted in self.predicted.items():
            if predicted.rate > _ENOUGH * self.predicted[best].rate:
                best = mode
        return best

    @property
    def _waits(self) -> tuple[bool, ...]:
        kind = self._config.backup_kind
        return (True, False) if kind == "auto" else (kind == "draft",)

    def _ks(self, k: int) -> Sequence[int]:
        chosen = self._config.chooses_k and k == self._config.speculated
        return range(1, AUTO_K + 1) if chosen else (k,)

    def _predict(self) -> dict[str, Predicted]:
        config, costs, seen, rows = self._config, self._costs, self._seen, self._config.slots
        ks = self._ks(config.speculated)
        found = {"ar": Predicted(ar(costs, rows=rows))}
        if config.mode in ("auto", "sd"):
            plan, rate = best_sd(costs, seen, ks, rows=rows)
            found["sd"] = Predicted(rate, plan)
        if config.prepared == "ssd":
            plan, rate = best_ssd(
                costs,
                seen,
                config.fan_out_of(config.speculated),
                ks=ks,
                budgets=config.budgets,
                waits=self._waits,
                rows=rows,
            )
            found["ssd"] = Predicted(rate, plan)
        return found


def open_chooser(
    loaded: Loaded, target: OpenedModel, draft: OpenedModel | None, context: int
) -> Chooser:
    """Measures what is not known yet of this machine and these models, and chooses.

    Raises:
      InputError: a draft worker that does not answer.
    """
    config = loaded.config
    setting = config.compile_cache
    directory = None if setting == "off" else costs_cache(setting)
    file = CostFile(directory, _about(loaded, target, draft, context))
    known = file.read(widths=loaded.programs.widths, budgets=config.budgets)
    if known is None:
        guess = _NGRAM if config.draft == "ngram" else Guess()
        known = KnownCosts(_measure(loaded, context), guess)
        file.write(known)
    return Chooser(
        config,
        known,
        file=file,
        drafting=functools.partial(_measure_draft, loaded, context) if config.draft_model else None,
    )


def _measure(loaded: Loaded, context: int) -> Costs:
    """Each role alone, then both at once, with as much work as a round may have."""
    config, programs = loaded.config, loaded.programs
    slots = config.slots
    blank = programs.verification.blank(slots)
    proposals: dict[int, Any] = {
        width: programs.model.place(blank._replace(length=np.full(slots, width, np.int32)))
        for width in programs.widths
    }
    verifications = Verifications(loaded.roles("ar", 0).target, proposals)
    costs = Costs(verify=verifications.seconds())
    if config.draft_model and config.mode != "ssd":
        costs = dataclasses.replace(costs, draft=_measure_draft(loaded, context))
    if config.prepared == "ssd":
        draft = loaded.branching(patience=PATIENCE)
        branches = Branches(draft, context)
        forwards = {m: branches.expansion(m) for m in sorted(config.budgets)}
        width, budget = max(programs.widths), max(config.budgets)
        together = branches.expansion(budget, lambda: verifications.run(width))
        costs = dataclasses.replace(
            costs,
            backup=branches.just_in_time(lambda: jax.block_until_ready(draft.proposal())),
            step={m: seconds / draft.k for m, seconds in forwards.items()},
            contention=contention(costs.verify[width], forwards[budget], together),
        )
        if loaded.worker is not None:
            loaded.worker.drafts.pop().close()
    return costs


def _measure_draft(loaded: Loaded, context: int) -> float:
    """T_1 of mode sd."""
    drafter = loaded.roles("sd", loaded.config.speculated).drafter
    assert drafter is not None
    return measure_drafter(
        drafter,
        loaded.config.slots,
        context,
        lambda drafted: jax.block_until_ready(drafted.proposal),
    )


def _about(
    loaded: Loaded, target: OpenedModel, draft: OpenedModel | None, context: int
) -> dict[str, Any]:
    """What costs and acceptance depend on."""
    config, device = loaded.config, jax.devices()[0]
    settings = {
        name: value for name, value in dataclasses.asdict(config).items() if name not in _NO_COST
    }
    return {
        "settings": settings,
        "device": [device.platform, device.device_kind, jax.device_count()],
        "processor": [cpu_model(), cpu_affinity()],
        "versions": versions(),
        "models": [None if model is None else model.fingerprint for model in (target, draft)],
        "context": context,
        "widths": loaded.programs.widths,
        "exact": loaded.exact,
    }
