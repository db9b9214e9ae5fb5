"""The modes of a pair of models on a slice, with the programs of each compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ssd_jax.devices.program_spec import Name
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.placement.device_groups import Grid
from ssd_jax.tools.aot.modes import Mode, Split, splits
from ssd_jax.tools.aot.parts import ChipSlice, ModelPart, build, draft_names, target_names
from ssd_jax.tools.aot.programs import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Two models, not loaded, and their compute dtypes."""

    target: ModelConfig
    draft: ModelConfig
    target_dtype: str
    draft_dtype: str


class _Job(NamedTuple):
    """Programs of a model to compile, unless the target that they are for does not fit."""

    role: str
    places: tuple[int, ...]
    model: FunctionalModel
    names: list[Name]
    beside: tuple[int, ...]  # places of the target


def modes_of(
    pair: ModelPair,
    slice_: ChipSlice,
    sizes: Sizes,
    split: Split | None = None,
    grid: Grid | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[Mode]:
    """AR and SD on all devices, and on those that SSD gives the target; SSD in every split.

    Of a number of devices that is no power of two, AR and SD are also on the largest power of two
    in it. Nothing is compiled twice, and nothing at all where only sizes are known.

    Args:
      split: the only one to look at; None looks at several.
      grid: of the target's devices, for AR, SD and SSD alike; a draft with devices of its own has
        them in one group.
      progress: called with programs done, programs in all, and the last one.

    Raises:
      InputError: a number of devices that divides nothing of a model; before any compile.
    """
    every = tuple(range(len(slice_.devices)))
    apart = splits(len(every), split, grid)
    together = [every] if grid is None else [apart[0][0] if apart else every[: grid.devices]]
    if grid is None and len(every) & (len(every) - 1):  # heads divide by fewer
        together.append(every[: 1 << (len(every).bit_length() - 1)])
    for target, _ in apart:  # a small target may be faster on fewer, which send each other less
        if len(target) not in map(len, together):
            together.append(target)
    groups = [*zip(together, together, strict=True), *apart]
    jobs, data = [], 1 if grid is None else grid.data
    for places in dict.fromkeys(target for target, _ in groups):
        model = slice_.model(pair.target, pair.target_dtype, places, data)
        jobs.append(_Job("target", places, model, target_names(sizes, model), beside=places))
    for target, places in groups:
        shares = data if target == places else 1
        model = slice_.model(pair.draft, pair.draft_dtype, places, shares)
        names = draft_names(sizes, branches=target != places)
        jobs.append(_Job("draft", places, model, names, beside=target))
    parts = _built(jobs, slice_, sizes, progress)
    modes = [Mode(name="ar", target=parts["target", places]) for places in together]
    for target, draft in groups:
        name = "sd" if target == draft else "ssd"
        modes.append(Mode(name=name, target=parts["target", target], draft=parts["draft", draft]))
    return modes


def _built(
    jobs: Sequence[_Job],
    slice_: ChipSlice,
    sizes: Sizes,
    progress: Callable[[int, int, str], None],
) -> dict[tuple[str, tuple[int, ...]], ModelPart]:
    jobs = jobs if slice_.compiles else [job._replace(names=[]) for job in jobs]
    total = sum(len(job.names) for job in jobs)
    done = 0
    parts: dict[tuple[str, tuple[int, ...]], ModelPart] = {}
    for job in jobs:
        target = parts.get(("target", job.beside))
        wanted = target is None or target.refused is None

        def tell(name: Name, where: str = f"{job.role} on {len(job.places)}") -> None:
            nonlocal done
            done += 1
            progress(done, total, f"{where}: {' '.join(map(str, name))}")

        parts[job.role, job.places] = build(
            job.role,
            job.model,
            job.names if wanted else [],
            chip=slice_.chip,
            places=job.places,
            sizes=sizes,
            done=tell,
        )
    return parts
