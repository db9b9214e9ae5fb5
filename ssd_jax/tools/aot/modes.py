"""AR, SD and SSD on a slice: whether each fits, and how fast it could be at best.

Pure arithmetic over the compiler's figures of programs; the estimate is that of `tuning`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ssd_jax.devices.opening.fit import Need
from ssd_jax.placement.device_groups import DeviceGroups, Grid
from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.speculation.tuner import SpeculationPlan
from ssd_jax.tools.aot import tree_rates
from ssd_jax.tools.aot.chips import Chip
from ssd_jax.tools.aot.parts import ModelPart
from ssd_jax.tools.aot.programs import Sizes
from ssd_jax.tools.bench.table import pluralize
from ssd_jax.tuning import throughput
from ssd_jax.tuning.throughput import Costs, Guess

Split = tuple[tuple[int, ...], tuple[int, ...]]
"""Places of the target's devices in a slice, and of the draft's."""

ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)


class DeviceNeed(NamedTuple):
    """What a device of a group must hold.

    Attributes:
      need: weights, pages, the most that a program needs for itself while it runs, and the code of
        all programs.
      refused: whether the compiler refuses one of the models there, whatever the sum.
    """

    need: Need
    refused: bool

    @property
    def fits(self) -> bool:
        """Whether a device holds it all."""
        return self.need.fits and not self.refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode and where its models are.

    Attributes:
      name: "ar", "sd" or "ssd".
      target, draft: on the same devices in sd, on different ones in ssd.
      nodes: of the trees that sd and ssd propose; 0 with chains.
    """

    name: str
    target: ModelPart
    draft: ModelPart | None = None
    nodes: int = 0

    @property
    def parts(self) -> list[ModelPart]:
        """Its models."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def groups(self) -> list[list[ModelPart]]:
        """Its models, those on the same devices together."""
        return [[part] for part in self.parts] if self.name == "ssd" else [self.parts]

    def __str__(self) -> str:
        """The name with the numbers of devices: "ssd 4 + 1", "sd 4, trees of 15"."""
        devices = " + ".join(str(len(group[0].devices)) for group in self.groups)
        return f"{self.name} {devices}" + (f", trees of {self.nodes}" if self.nodes else "")

    def needs(self, chip: Chip) -> list[DeviceNeed]:
        """What a device of each group of devices must hold."""
        return [
            _device_need(f"{self}: {' and '.join(part.role for part in group)}", group, chip)
            for group in self.groups
        ]

    def refused(self, chip: Chip) -> str | None:
        """Why it does not fit; None where it does."""
        for part in self.parts:
            if part.refused is not None:
                return f"{part.role} on {len(part.devices)}: {part.refused}"
        for need, _ in self.needs(chip):
            if not need.fits:
                return (
                    f"{need.memory} takes {need.total / 2**30:.1f} GiB of a device, which has "
                    f"{chip.memory / 2**30:.2f}"
                )
        return None

    def rate(self, acceptance: float, sizes: Sizes, fan_out: FanOut) -> float:
        """Upper bound on the tokens per second of all sequences.

        `acceptance` is the rate at which proposed tokens are accepted; `fan_out` divides branches.
        """
        guess, k, rows = Guess(acceptance=acceptance), sizes.k, sizes.slots
        costs = self.costs(sizes)
        if self.name == "ar":
            return throughput.ar(costs, rows=rows)
        if self.nodes and self.name == "sd":
            return tree_rates.sd(costs, acceptance, sizes)
        if self.nodes:
            assert self.draft is not None
            seconds = tree_rates.seconds_of(self.target, self.draft, sizes)
            return tree_rates.ssd(seconds, acceptance, sizes)
        if self.name == "sd":
            return throughput.sd(costs, guess, SpeculationPlan(k=k), rows=rows)
        best = throughput.best_ssd(
            costs,
            guess,
            fan_out,
            ks=(k,),
            budgets=(sizes.branches,),
            waits=(True, False),
            rows=rows,
        )
        return best.rate

    def costs(self, sizes: Sizes) -> Costs:
        """Lower bounds of the seconds of the parts of a round.

        Models on devices of their own do not slow each other down.
        """
        k = sizes.k
        verify = {
            width: self.target.seconds("forward", width)
            + self.target.seconds("accept", sizes.slots, width)
            for width in (0, k)
        }
        if self.draft is None:
            return Costs(verify=verify)
        draft = self.draft
        if self.nodes and self.name == "sd":
            seconds = self.target.seconds("forward_tree") + self.target.seconds("accept_tree")
            seconds += draft.seconds("begin_tree") + (k - 1) * draft.seconds("grow_tree")
            return Costs(verify=verify, trees={self.nodes: seconds})
        if self.nodes:
            return Costs(verify=verify)
        drafted = (draft.seconds("start", k) + (k - 1) * draft.seconds("step", k)) / k
        if self.name == "sd":
            return Costs(verify=verify, draft=drafted)
        forwards = SpeculationPlan.of_branches(k, sizes.branches).forwards
        branching = draft.seconds("promote", k) + draft.seconds("expand", k)
        branching += (forwards - 1) * draft.seconds("grow", k)
        return Costs(verify=verify, backup=drafted, step={sizes.branches: branching / forwards})


def _device_need(memory: str, group: Sequence[ModelPart], chip: Chip) -> DeviceNeed:
    """Of models on the same devices, whose programs run one after the other."""
    programs = [program for part in group for program in part.programs.values()]
    parts = {
        "weights": sum(part.weights for part in group),
        "pages": sum(part.pages for part in group),
        "running": max(
            (program.other_buffers + program.temporaries for program in programs), default=0
        ),
        "code": sum(program.code for program in programs),
    }
    refused = any(part.refused is not None for part in group)
    return DeviceNeed(Need(parts, chip.memory, memory), refused)


def splits(count: int, split: Split | None = None, grid: Grid | None = None) -> list[Split]:
    """Splits to compare: `split` alone, or the default and the same with one draft device.

    None is possible with one device, or where the target's grid has all.
    """
    if split is not None:
        return [split]
    if count < 2 or (grid is not None and grid.devices == count):
        return []
    target, draft = DeviceGroups(target=None, draft=None).split(count, grid)
    return [(target, part) for part in dict.fromkeys((draft, draft[:1]))]


def size_verdict(modes: Sequence[Mode], where: str) -> str:
    """One line: which modes fit by what models hold.

    Args:
      modes: those that fit.
      where: the devices, in words.
    """
    if not modes:
        return _nothing_fits(where)
    return (
        f"{where} have room for weights and pages of {', '.join(map(str, modes))}; programs need "
        "more, which a compile measures"
    )


def _nothing_fits(where: str) -> str:
    return f"nothing fits {where}: take more devices, fewer slots, less context or int8"


def pays_from(modes: Sequence[Mode], sizes: Sizes, fan_out: FanOut) -> float | None:
    """The least acceptance, in hundredths, at which one of these modes, of SD or SSD, is as fast
    as the fastest AR of them; None where none is at any."""
    ar = _fastest_ar(modes, sizes, fan_out).rate(1.0, sizes, fan_out)
    others = [mode for mode in modes if mode.name != "ar"]
    return throughput.least_acceptance(
        lambda acceptance: any(mode.rate(acceptance, sizes, fan_out) >= ar for mode in others)
    )


def losses(modes: Sequence[Mode], sizes: Sizes, fan_out: FanOut) -> str | None:
    """One line: where speculation is slower than AR, and what a verification costs; None where it
    is not at any of `ACCEPTANCES`, or where there is nothing to compare.

    Args:
      modes: those that fit.
    """
    if {mode.name == "ar" for mode in modes} != {True, False}:
        return None
    least = pays_from(modes, sizes, fan_out)
    if least is not None and least <= ACCEPTANCES[0]:
        return None
    where = "at every acceptance" if least is None else f"below an acceptance of {least:.2f}"
    verify = _fastest_ar(modes, sizes, fan_out).costs(sizes).verify
    return (
        f"AR is faster than SD and SSD {where}: verifying {sizes.k} tokens takes "
        f"{verify[sizes.k] / verify[0]:.2f} times as long as a forward of one"
    )


def _fastest_ar(modes: Sequence[Mode], sizes: Sizes, fan_out: FanOut) -> Mode:
    plain = [mode for mode in modes if mode.name == "ar"]
    return max(plain, key=lambda mode: mode.rate(1.0, sizes, fan_out))


def verdict(modes: Sequence[Mode], rates: Sequence[Sequence[float]], where: str) -> str:
    """One line: whether SSD pays, and in which split.

    Args:
      modes: those that fit.
      rates: tokens per second of each mode at each of `ACCEPTANCES`.
      where: the slice, in words.
    """
    mode_rates = list(zip(modes, rates, strict=True))
    ssd_rates = [row for row in mode_rates if row[0].name == "ssd"]
    other_rates = [row for row in mode_rates if row[0].name != "ssd"]

    def fastest(rows: Sequence[tuple[Mode, Sequence[float]]], place: int) -> tuple[Mode, float]:
        mode, speeds = max(rows, key=lambda row: row[1][place])
        return mode, speeds[place]

    if not modes:
        return _nothing_fits(where)
    if not other_rates:
        return f"SSD is all that fits {where}: {fastest(ssd_rates, -1)[0]}"
    if all(len(part.devices) == 1 for mode in modes for part in mode.parts):
        return f"SSD has no devices for its draft on {where}: take two or more"
    if not ssd_rates:
        return f"SSD does not pay on {where}: no split of it holds both models"
    places = range(len(ACCEPTANCES))
    gains = [fastest(ssd_rates, place)[1] / fastest(other_rates, place)[1] for place in places]
    place = max(places, key=lambda index: gains[index])
    split, other = fastest(ssd_rates, place)[0], fastest(other_rates, place)[0]
    gain = f"{gains[place]:.2f} times {other} at an acceptance of {ACCEPTANCES[place]}"
    target, draft = (pluralize(len(part.devices), "device") for part in split.parts)
    where_split = f"target on {target}, draft on {draft}"
    if gains[place] <= 1:
        return (
            f"SSD does not pay on {where}: at best {gain}, with the {where_split}; take "
            f"{other.name}"
        )
    paying = [str(a) for a, gain in zip(ACCEPTANCES, gains, strict=True) if gain > 1]
    return (
        f"SSD pays on {where} at acceptances of {', '.join(paying)}: {gain}, with the {where_split}"
    )
