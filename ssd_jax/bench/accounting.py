"""`--suite=accounting`: what SSD gains, by two ways to count the hardware.

*Paper accounting*: the target has the same cores in all modes, and the draft of SSD has others.
*Equal hardware*: AR and SD have the cores of both. The two groups of cores swap roles halfway,
since they may differ, and each mode counts with its own best K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ssd_jax.bench import stats
from ssd_jax.bench.pinned import PinnedModel
from ssd_jax.bench.prompts import Prompt
from ssd_jax.bench.run import BenchResult, Variant, joined, run_paired
from ssd_jax.bench.stats import Estimate
from ssd_jax.bench.table import Column, build_table, estimate_cell
from ssd_jax.config import NGRAM_K, Config
from ssd_jax.runtime.cores import shown
from ssd_jax.runtime.request import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
      config: of mode ssd; its placement and cores are set here.
      groups: two disjoint groups of processor cores.
      ks: values of K.
      params: of every prompt.
    """

    config: Config
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    ks: tuple[int, ...]
    params: SamplingParams

    def ssd(self, target: tuple[int, ...], draft: tuple[int, ...]) -> Config:
        """Target and draft on cores of their own; sd has those of the target."""
        return dataclasses.replace(
            self.config,
            draft_placement="process",
            target_cores=shown(target),
            draft_cores=shown(draft),
            k=str(self.ks[0]),
        )

    def sd(self, cores: tuple[int, ...]) -> Config:
        """Both on the same cores."""
        return dataclasses.replace(self._without_ssd(), mode="sd", target_cores=shown(cores))

    def ngram(self, cores: tuple[int, ...]) -> Config:
        """The target alone."""
        models = ("draft_dtype", "draft_temperature", "proposal_support")
        return dataclasses.replace(
            self._without_ssd(),
            mode="sd",
            draft="ngram",
            target_cores=shown(cores),
            k=str(NGRAM_K),
            **dict.fromkeys(models),
        )

    def _without_ssd(self) -> Config:
        ours = ("draft_placement", "draft_cores", "budget", "fan_out", "saguaro_c", "backup")
        return dataclasses.replace(
            self.config,
            mode="sd",
            k=str(self.ks[0]),
            **dict.fromkeys((*ours, "predict")),
        )


def measure(
    plan: Plan,
    prompts: Sequence[Prompt],
    *,
    warmup: int,
    progress: Callable[[int, int], None] | None = None,
    start: Callable[..., PinnedModel] = PinnedModel,
) -> BenchResult:
    """Every prompt in every mode, once with the groups in each role.

    Raises:
      InputError: a model that cannot be loaded.
    """
    first, second = plan.groups

    def opened(config: Config, until: ExitStack) -> PinnedModel:
        model = start(config, plan.params, ks=plan.ks if config.draft_model else ())
        until.callback(model.close)
        model.wait_ready()  # one after the other: loading takes more memory than having loaded
        return model

    halves = []
    with ExitStack() as whole:
        equal = opened(plan.sd((*first, *second)), whole)
        for target, draft in ((first, second), (second, first)):
            with ExitStack() as half:
                apart = opened(plan.ssd(target, draft), half)
                ngram = opened(plan.ngram(target), half)
                halves.append(
                    run_paired(
                        _variants(plan, apart, ngram, equal),
                        prompts,
                        warmup=warmup,
                        repeats=1,
                        progress=progress,
                    )
                )
    return joined(halves)


def _variants(
    plan: Plan, apart: PinnedModel, ngram: PinnedModel, equal: PinnedModel
) -> dict[str, Variant]:
    found = {"ar": apart.variant("ar", None), "n-gram": ngram.variant("sd", None)}
    found |= {f"sd k={k}": apart.variant("sd", k) for k in plan.ks}
    found |= {f"ssd k={k}": apart.variant("ssd", k) for k in plan.ks}
    found["ar, all cores"] = equal.variant("ar", None)
    return found | {f"sd k={k}, all cores": equal.variant("sd", k) for k in plan.ks}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """One way to count.

    Attributes:
      name: of it.
      sd, ssd: the fastest variant of each mode.
      over_sd, over_ar: the speed of SSD against them, paired by prompt.
    """

    name: str
    sd: str
    ssd: str
    over_sd: Estimate | None
    over_ar: Estimate | None


def gains(result: BenchResult) -> list[Gain]:
    """What SSD gains by each way to count."""
    speeds = {name: _speeds(result, name) for name in result.variants}
    ssd = _fastest(speeds, [name for name in speeds if name.startswith("ssd ")])
    found = []
    for name, end in (("paper accounting", ""), ("equal hardware", ", all cores")):
        sds = [n for n in speeds if n.startswith("sd ") and n.endswith(", all cores") == bool(end)]
        sd = _fastest(speeds, sds)
        found.append(
            Gain(
                name=name,
                sd=sd,
                ssd=ssd,
                over_sd=stats.ratio_interval(*stats.paired(speeds[ssd], speeds[sd])),
                over_ar=stats.ratio_interval(*stats.paired(speeds[ssd], speeds[f"ar{end}"])),
            )
        )
    return found


def gains_json(found: Sequence[Gain]) -> list[dict[str, Any]]:
    """For `json.dumps`."""
    return [dataclasses.asdict(gain) for gain in found]


def gains_table(found: Sequence[Gain]) -> Table:
    """A line for each way to count."""
    columns: list[Column[Gain]] = [
        Column(title="", cell=lambda row: Text(row.name, style="cyan"), justify="left"),
        Column(title="fastest sd", cell=lambda row: row.sd, justify="left"),
        Column(title="fastest ssd", cell=lambda row: row.ssd, justify="left"),
        Column(title="ssd/sd", cell=lambda row: estimate_cell(row.over_sd, "{:.2f}x")),
        Column(title="ssd/ar", cell=lambda row: estimate_cell(row.over_ar, "{:.2f}x")),
    ]
    notes = [
        "paper accounting: ar and sd have the target's cores, ssd those of the draft beside them",
        "equal hardware: ar and sd have all of them; each half of the runs swaps the groups",
    ]
    return build_table(columns, found, title="what ssd gains", notes=notes)


def _speeds(result: BenchResult, variant: str) -> Mapping[tuple[str, int], float | None]:
    return {
        runs.prompt.key: runs.median(lambda one: one.decode_tokens_per_second)
        for runs in result.of(variant)
    }


def _fastest(
    speeds: Mapping[str, Mapping[tuple[str, int], float | None]], names: Sequence[str]
) -> str:
    def median(name: str) -> float:
        found = [speed for speed in speeds[name].values() if speed is not None]
        return float(np.median(found)) if found else 0.0

    return max(names, key=median)
