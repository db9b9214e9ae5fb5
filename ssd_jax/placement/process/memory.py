"""Whether a worker's own memory holds what an engine wants, which only the worker can tell."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_jax.devices.opened import OpenedModel
from ssd_jax.devices.paged_programs import page_size
from ssd_jax.devices.passes import history_structs
from ssd_jax.devices.sizes import (
    branch_structs,
    bytes_of_process,
    bytes_per_device,
    device_limit,
    devices_of_process,
)
from ssd_jax.errors import InputError
from ssd_jax.system.host_memory import memory_limit
from ssd_jax.wire.messages import Hello


def check_memory(
    opened: OpenedModel,
    about: Hello,
    budgets: Sequence[int],
    *,
    engines: int,
    copies: int,
    room: int = 0,
) -> None:
    """Refuses an engine that needs more than its share of the memory left by the weights.

    Args:
      opened: the draft, on the devices that it will have.
      about, budgets: what the engine wants.
      engines: most engines at a time, which share the memory of the draft's devices.
      copies: copies of the weights, this one included: engines that want other things have their
        own.
      room: of the programs on a device, see `room_of`; 0 until they are compiled.

    Raises:
      InputError: the engine needs more.
    """
    told = device_limit(opened)
    size_of = bytes_per_device if told else bytes_of_process
    limit, whose = (told, "each of its devices") if told else memory_limit()
    model, slots = opened.model, about.slots
    parts = {
        "keys and values": model.page_struct(
            about.pages or slots, about.page_size or page_size(about.context)
        ),
        "records of past tokens": history_structs(model, slots),
        "branches": branch_structs(
            opened, slots=slots, k=about.k, budgets=budgets, support=about.support
        ),
    }
    sizes = {name: size_of(structs) for name, structs in parts.items()}
    sizes["programs"] = room if told else room * devices_of_process(opened)
    weights = copies * size_of(model.parameter_structs())
    needed, share = sum(sizes.values()), (limit - weights) // engines
    if needed <= share:
        return
    each = ", ".join(f"{name} {_mib(size)}" for name, size in sizes.items() if size)
    shared, fewer = "this engine", ""
    if engines > 1:
        shared, fewer = f"each of {engines} engines", ", or start it with fewer --engines"
    raise InputError(
        f"{slots} slots of context = {about.context} with budget = "
        f"{' and '.join(map(str, budgets))} and k = {about.k} need {_mib(needed)} of the draft "
        f"worker's memory ({each}), and there are {_mib(share)} for {shared} ({whose}: "
        f"{_mib(limit)}, weights {_mib(weights)}); lower one of them{fewer}"
    )


def _mib(size: int) -> str:
    return f"{max(size, 0) // 2**20} MiB"
