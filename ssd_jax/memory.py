"""Whether it all fits: sequences in the models' contexts; weights, keys and values, and prepared
branches in memory, since a process that asks for more than there is ends without a word."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ssd_jax.config import DEFAULT_CONTEXT, SUPPORT, Config
from ssd_jax.devices.passes import page_size
from ssd_jax.errors import InputError
from ssd_jax.system.host_memory import memory_limit

if TYPE_CHECKING:
    from ssd_jax.devices.opened import OpenedModel
    from ssd_jax.placement.placement import Placement

Parts = dict[str, int]
"""Bytes by what they are for."""


def fitting_context(config: Config, limits: Mapping[str, int], ks: Sequence[int]) -> int:
    """Positions of a sequence: as configured, or what all models were made for.

    Args:
      config: settings.
      limits: positions that each model was made for, by its source.
      ks: values of K to prepare.

    Raises:
      InputError: more than a model was made for, or too few for a K.
    """
    least = min(limits, key=lambda source: limits[source])
    limit = limits[least]
    context = config.context or min(DEFAULT_CONTEXT, limit)
    if context > limit:
        raise InputError(
            f"context = {context} is more than the {limit} positions that "
            f"{least} was made for; lower --context"
        )
    most = max(ks, default=0)
    if most > context - 2:
        raise InputError(
            f"k = {most} does not fit a context of {context}, which must "
            "hold a prompt token and a pending one beside; lower --k or raise --context"
        )
    return context


def host_parts(
    config: Config,
    target: OpenedModel,
    draft: OpenedModel | None,
    context: int,
    *,
    placement: Placement,
    engines: Sequence[tuple[str, int]],
) -> Parts:
    """What engines need of this machine's memory; what lies on accelerators is not counted.

    Args:
      config, target, draft, context: as they are loaded.
      placement: of the draft; a process of its own is on this machine, too.
      engines: (mode, K) of each; each has slots of its own.
    """
    on_host = jax.default_backend() == "cpu"
    size = page_size(context)
    parts: Parts = {}
    if on_host:
        parts["weights of the target"] = _size(target.model.parameter_structs())
        pages = target.model.page_structs(config.slots, size)
        parts["its keys and values"] = len(engines) * _size(pages)
    drafting = [mode for mode, _ in engines if mode != "ar"]
    if draft is None or not (drafting or config.prepared == "ssd"):
        return parts
    apart = placement.kind == "process"
    copies = apart + (on_host and (not apart or "sd" in drafting))
    counted = drafting if on_host else [mode for mode in drafting if mode == "ssd" and apart]
    pages = draft.model.page_structs(config.slots, size)
    parts["weights of the draft"] = copies * _size(draft.model.parameter_structs())
    parts["the draft's keys and values"] = len(counted) * _size(pages)
    ks = [k for mode, k in engines if mode == "ssd"]
    if config.branches and ks and (on_host or apart):
        parts["branches"] = len(ks) * _size(_branches(config, draft, max(ks)))
    return parts


def _branches(config: Config, draft: OpenedModel, k: int) -> Any:
    """Their keys and values, q with its ids, and the logits."""
    branches = sum(config.budgets)
    rows, outputs = config.slots * branches, draft.model.config.outputs
    support = SUPPORT if config.proposal_support is None else config.proposal_support
    ids = outputs if support == "full" else int(support)
    return [
        draft.model.branch_structs(config.slots, k, branches),
        jax.ShapeDtypeStruct((rows, k, 2 * ids), np.float32),
        jax.ShapeDtypeStruct((rows, outputs), np.float32),
    ]


def check_fits(config: Config, context: int, parts: Parts) -> None:
    """Refuses what does not fit.

    Args:
      parts: see `host_parts`.

    Raises:
      InputError: the parts together are more than this process may have.
    """
    limit, whose = memory_limit()
    needed = sum(parts.values())
    if needed <= limit:
        return
    branches = parts.get("branches")
    budget = f" with budget = {' and '.join(map(str, config.budgets))}" if branches else ""
    raise InputError(
        f"slots = {config.slots} of context = {context}{budget} need {_gib(needed)} GiB of memory ("
        + ", ".join(f"{what} {_gib(size)}" for what, size in parts.items() if size)
        + f"), {whose} has {_gib(limit)}; lower one of them"
        + (", or --proposal_support" if branches else "")
        + (", or give one budget" if len(config.budgets) > 1 else "")
        + ", or use a smaller model or dtype"
    )


def bytes_per_device(structs: Any) -> int:
    """What each device holds of arrays of these structs, in bytes."""
    return sum(_share(struct) for struct in jax.tree.leaves(structs))


def _size(structs: Any) -> int:
    """Bytes of all devices together."""
    return sum(_share(struct) * _devices(struct) for struct in jax.tree.leaves(structs))


def _share(struct: jax.ShapeDtypeStruct) -> int:
    whole = struct.sharding is None
    shape = struct.shape if whole else struct.sharding.shard_shape(struct.shape)
    return math.prod(shape) * struct.dtype.itemsize


def _devices(struct: jax.ShapeDtypeStruct) -> int:
    return 1 if struct.sharding is None else len(struct.sharding.device_set)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
