"""Everything that is asked of a pair on a slice: its modes, with the programs of each compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ssd_jax.aot.modes import Mode, Split, splits
from ssd_jax.aot.parts import Part, Slice, build, draft_names, target_names
from ssd_jax.aot.programs import Sizes
from ssd_jax.devices.passes import Name
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models, not loaded.

    Attributes:
      target, draft: their configurations.
      target_dtype, draft_dtype: what they compute in.
    """

    target: ModelConfig
    draft: ModelConfig
    target_dtype: str
    draft_dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Job:
    role: str
    places: tuple[int, ...]
    model: FunctionalModel
    names: list[Name]


def modes_of(
    pair: Pair,
    slice_: Slice,
    sizes: Sizes,
    split: Split | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, text: None,
) -> list[Mode]:
    """AR and SD on all devices, and SSD in every split; nothing is compiled twice.

    Args:
      pair, slice_, sizes: what is asked about.
      split: the only one to look at; None looks at several.
      progress: called with programs done, programs in all, and the next one.

    Raises:
      InputError: a number of devices that divides nothing of a model; before any compile.
    """
    every = tuple(range(len(slice_.devices)))
    found = splits(len(every), split)
    wanted = [("target", every, False), ("draft", every, False)]
    for target, draft in found:
        wanted += [("target", target, False), ("draft", draft, True)]
    jobs = [_job(pair, slice_, sizes, *each) for each in dict.fromkeys(wanted)]
    parts = _built(jobs, slice_, sizes, progress)
    target = parts["target", every]
    modes = [
        Mode(name="ar", target=target),
        Mode(name="sd", target=target, draft=parts["draft", every]),
    ]
    return modes + [
        Mode(name="ssd", target=parts["target", of_target], draft=parts["draft", of_draft])
        for of_target, of_draft in found
    ]


def _job(
    pair: Pair, slice_: Slice, sizes: Sizes, role: str, places: tuple[int, ...], branches: bool
) -> _Job:
    if role == "target":
        model = slice_.model(pair.target, pair.target_dtype, places)
        return _Job(role=role, places=places, model=model, names=target_names(sizes, model))
    model = slice_.model(pair.draft, pair.draft_dtype, places)
    names = draft_names(sizes, branches=branches)
    return _Job(role=role, places=places, model=model, names=names)


def _built(
    jobs: Sequence[_Job],
    slice_: Slice,
    sizes: Sizes,
    progress: Callable[[int, int, str], None],
) -> dict[tuple[str, tuple[int, ...]], Part]:
    total = sum(len(job.names) for job in jobs)
    done = 0
    parts = {}
    for job in jobs:
        where = f"{job.role} on {len(job.places)}"

        def tell(name: Name, where: str = where) -> None:
            nonlocal done
            done += 1
            progress(done, total, f"{where}: {' '.join(map(str, name))}")

        parts[job.role, job.places] = build(
            job.role,
            job.model,
            job.names,
            chip=slice_.chip,
            places=job.places,
            sizes=sizes,
            done=tell,
        )
    return parts
