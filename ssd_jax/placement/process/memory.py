"""Whether a worker's own memory holds what an engine wants, which only the worker can tell."""

from __future__ import annotations

from ssd_jax.devices.opening.fit import ModelBytes, Need
from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.opening.sizes import (
    branch_structs,
    bytes_of_process,
    bytes_per_device,
    device_limit,
    devices_of_process,
)
from ssd_jax.devices.programs.paged import Paging, page_size
from ssd_jax.errors import InputError
from ssd_jax.system.host_memory import memory_limit
from ssd_jax.wire.draft_spec import DraftSpec


def check_memory(
    opened: OpenedModel,
    spec: DraftSpec,
    *,
    engines: int,
    copies: int,
    programs: int = 0,
) -> None:
    """Refuses an engine that needs more than its share of the memory left by the weights.

    Args:
      opened: the draft, on the devices that it will have.
      spec: what the engine wants.
      engines: most engines at a time, which share the memory of the draft's devices.
      copies: copies of the weights, this one included: engines that want other things have their
        own.
      programs: bytes that they take on a device while they run; 0 until they are compiled.

    Raises:
      InputError: the engine needs more.
    """
    of_device, slots = device_limit(opened), spec.slots
    size_of = bytes_per_device if of_device else bytes_of_process
    limit, whose = (of_device, "each of its devices") if of_device else memory_limit()
    paging = Paging(spec.page_size or page_size(spec.context), spec.pages or slots)
    sizes = ModelBytes(model=opened.model, slots=slots, paging=paging, size_of=size_of)
    branches = branch_structs(
        opened,
        slots=slots,
        k=spec.k,
        budgets=spec.budgets,
        support=spec.support,
        tree=spec.drafting.tree,
    )
    parts = {
        "keys and values": sizes.pages,
        "records of past tokens": sizes.records,
        "branches": size_of(branches),
        "programs": programs if of_device else programs * devices_of_process(opened),
    }
    weights = copies * sizes.weights
    need = Need(parts, (limit - weights) // engines, whose)
    if need.fits:
        return
    parts_text = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)
    whose_share, fewer = "this engine", ""
    if engines > 1:
        whose_share, fewer = f"each of {engines} engines", ", or start it with fewer --engines"
    raise InputError(
        f"{slots} slots of context = {spec.context} with budget = "
        f"{' and '.join(map(str, spec.budgets))} and k = {spec.k} need {_mib(need.total)} of the "
        f"draft worker's memory ({parts_text}), and there are {_mib(need.limit)} for {whose_share} "
        f"({whose}: {_mib(limit)}, weights {_mib(weights)}); lower one of them{fewer}"
    )


def _mib(size: int) -> str:
    return f"{max(size, 0) // 2**20} MiB"
