"""The modes of a pair of models on a slice, with the programs of each compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ssd_jax.devices.programs.program_spec import Name
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.placement.device_groups import Grid
from ssd_jax.tools.aot.modes import Mode, Split, splits
from ssd_jax.tools.aot.parts import ChipSlice, ModelPart, build, draft_names, target_names
from ssd_jax.tools.aot.programs import Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelPair:
    """Two models, not loaded, and their compute dtypes.

    Attributes:
      weights, draft_weights: forms of the matrices of each model's layers, see `ChipSlice.model`;
        None is the dtype.
      expert_parallel: of the target, see `Config`.
    """

    target: ModelConfig
    draft: ModelConfig
    target_dtype: str
    draft_dtype: str
    weights: GroupForm | None = None
    draft_weights: GroupForm | None = None
    expert_parallel: bool = False


class _Job(NamedTuple):
    """Programs of a model to compile, unless the target that they are for does not fit."""

    role: str
    places: tuple[int, ...]
    model: FunctionalModel
    names: list[Name]
    target_places: tuple[int, ...]


def modes_of(
    pair: ModelPair,
    slice_: ChipSlice,
    sizes: Sizes,
    split: Split | None = None,
    grid: Grid | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[Mode]:
    """AR and SD on all devices, and on those that SSD gives the target; SSD in every split. Where
    there are trees, SD and SSD are there with chains and with trees.

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
    all_places = tuple(range(len(slice_.devices)))
    ssd_splits = splits(len(all_places), split, grid)
    shared = (
        [all_places]
        if grid is None
        else [ssd_splits[0][0] if ssd_splits else all_places[: grid.devices]]
    )
    if grid is None and len(all_places) & (len(all_places) - 1):  # heads divide by fewer
        shared.append(all_places[: 1 << (len(all_places).bit_length() - 1)])
    for (
        target,
        _,
    ) in ssd_splits:  # a small target may be faster on fewer, which send each other less
        if len(target) not in map(len, shared):
            shared.append(target)
    groups = [*zip(shared, shared, strict=True), *ssd_splits]
    jobs, data = [], 1 if grid is None else grid.data
    for places in dict.fromkeys(target for target, _ in groups):
        model = slice_.model(
            pair.target,
            pair.target_dtype,
            places,
            data,
            pair.weights,
            expert_parallel=pair.expert_parallel,
        )
        jobs.append(_Job("target", places, model, target_names(sizes, model), target_places=places))
    for target, places in groups:
        shares = data if target == places else 1
        model = slice_.model(pair.draft, pair.draft_dtype, places, shares, pair.draft_weights)
        names = draft_names(sizes, branches=target != places)
        jobs.append(_Job("draft", places, model, names, target_places=target))
    parts = _build_parts(jobs, slice_, sizes, progress)
    modes = [Mode(name="ar", target=parts["target", places]) for places in shared]
    for target, draft in groups:
        name = "sd" if target == draft else "ssd"
        mode = Mode(name=name, target=parts["target", target], draft=parts["draft", draft])
        modes.append(mode)
        if sizes.nodes:
            modes.append(dataclasses.replace(mode, nodes=sizes.nodes))
    return modes


def _build_parts(
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
        target = parts.get(("target", job.target_places))
        fits_target = target is None or target.refused is None

        def report_compiled(name: Name, where: str = f"{job.role} on {len(job.places)}") -> None:
            nonlocal done
            done += 1
            progress(done, total, f"{where}: {' '.join(map(str, name))}")

        parts[job.role, job.places] = build(
            job.role,
            job.model,
            job.names if fits_target else [],
            chip=slice_.chip,
            places=job.places,
            sizes=sizes,
            on_compiled=report_compiled,
        )
    return parts
