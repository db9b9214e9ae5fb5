"""Checks that everything fits memory.

Weights, keys and values, histories, prepared branches and running programs are counted, since a
process that asks for more memory than there is is killed without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from ssd_jax.devices.opening.fit import ModelBytes, Need, Parts
from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.opening.sizes import (
    branch_structs,
    bytes_of_process,
    bytes_per_device,
    device_limit,
    devices_of_process,
    tree_structs,
)
from ssd_jax.devices.programs.paged import Paging, page_size
from ssd_jax.errors import InputError
from ssd_jax.loading.resolved import Resolved
from ssd_jax.sampling.rules import RULES
from ssd_jax.system.host_memory import memory_limit

Engines = Sequence[tuple[str, int]]
"""Mode and K of each; each has slots of its own."""


class _Copies(NamedTuple):
    """How many copies there are of a model's weights, of its pages and of its histories."""

    weights: int
    pages: int
    records: int


def check_memory(resolved: Resolved, engines: Engines, programs: Mapping[str, int]) -> None:
    """Refuses engines that do not fit; see `needs`.

    Raises:
      InputError: the parts together are more than a memory may hold.
    """
    for need in needs(resolved, engines, programs):
        _check(resolved, need)


def needs(
    resolved: Resolved,
    engines: Engines,
    programs: Mapping[str, int] = MappingProxyType({}),
) -> list[Need]:
    """What engines need of this machine's memory, and of each device that reports its memory.

    A draft in a process of its own is also on this machine.

    Args:
      programs: see `Loaded.program_bytes`, as far as it is known.
    """
    limit, whose = memory_limit()
    of_memories = [Need(_host_parts(resolved, engines, programs), limit, whose)]
    for role, parts in _device_parts(resolved, engines, programs).items():
        opened = resolved.target if role == "target" else resolved.draft
        limit = None if opened is None else device_limit(opened)
        if limit is not None:
            of_memories.append(Need(parts, limit, f"each device of the {role}"))
    return of_memories


def _device_parts(
    resolved: Resolved, engines: Engines, programs: Mapping[str, int]
) -> dict[str, Parts]:
    """By role, what each of its accelerators holds; a draft on the target's is counted there."""
    if jax.default_backend() == "cpu":
        return {}
    placement, draft = resolved.placement, resolved.draft
    parts = _target_parts(resolved, len(engines), bytes_per_device)
    parts["its programs"] = programs.get("target", 0)
    by_role = {"target": parts}
    drafting = [
        (mode, k)
        for mode, k in engines
        if mode == "sd" or (mode == "ssd" and not placement.out_of_process)
    ]
    if draft is None or not drafting:
        return by_role
    copies = _Copies(1, len(drafting), len(drafting))
    if placement.kind == "submesh":
        parts = by_role["draft"] = {}
    parts |= _draft_parts(resolved, draft, copies, bytes_per_device)
    parts["the draft's programs"] = programs.get("draft", 0)
    parts |= _branch_parts(resolved, draft, drafting, bytes_per_device)
    parts |= _tree_parts(resolved, draft, drafting, bytes_per_device)
    return by_role


def _host_parts(resolved: Resolved, engines: Engines, programs: Mapping[str, int]) -> Parts:
    on_host = jax.default_backend() == "cpu"
    config, placement, draft = resolved.config, resolved.placement, resolved.draft
    parts: Parts = {}
    if on_host:
        parts |= _target_parts(resolved, len(engines), bytes_of_process)
        parts["its programs"] = devices_of_process(resolved.target) * programs.get("target", 0)
    drafting = [mode for mode, _ in engines if mode != "ar"]
    if draft is None or not (drafting or config.prepared == "ssd"):
        return parts
    # No other process can measure the memory of a draft's process on GPUs of its own.
    in_worker = placement.kind == "process" and placement.workers[0].platform == "cpu"
    inline, layout = on_host and not placement.out_of_process, placement.layout
    weights = in_worker * layout.workers + (inline or (on_host and "sd" in drafting))
    # A worker has pages for its own slots only, but all pages where slots share them.
    is_shared = config.kv_memory is not None or config.page_size is not None

    def copies_of(of_workers: int) -> int:
        return sum(
            of_workers if mode == "ssd" and in_worker else on_host and (mode == "sd" or inline)
            for mode in drafting
        )

    copies = _Copies(
        weights,
        copies_of(layout.workers if is_shared else layout.parts),
        copies_of(layout.parts),
    )
    parts |= _draft_parts(resolved, draft, copies, bytes_of_process)
    if on_host:
        parts["the draft's programs"] = devices_of_process(draft) * programs.get("draft", 0)
        parts |= _tree_parts(resolved, draft, engines, bytes_of_process)
    if inline or in_worker:
        parts |= _branch_parts(resolved, draft, engines, bytes_of_process)
    return parts


def _target_parts(resolved: Resolved, engines: int, size_of: Callable[[Any], int]) -> Parts:
    sizes = _bytes_of(resolved, resolved.target, size_of)
    return {
        "weights of the target": sizes.weights,
        "its keys and values": engines * sizes.pages,
        "its records of past tokens": engines * sizes.records,
    }


def _draft_parts(
    resolved: Resolved, draft: OpenedModel, copies: _Copies, size_of: Callable[[Any], int]
) -> Parts:
    sizes = _bytes_of(resolved, draft, size_of)
    return {
        "weights of the draft": copies.weights * sizes.weights,
        "the draft's keys and values": copies.pages * sizes.pages,
        "the draft's records of past tokens": copies.records * sizes.records,
    }


def _bytes_of(resolved: Resolved, opened: OpenedModel, size_of: Callable[[Any], int]) -> ModelBytes:
    slots = resolved.config.slots
    paging = resolved.paging or Paging(page_size(resolved.context), slots)
    return ModelBytes(model=opened.model, slots=slots, paging=paging, size_of=size_of)


def _branch_parts(
    resolved: Resolved, draft: OpenedModel, engines: Engines, size_of: Callable[[Any], int]
) -> Parts:
    """Of the engines of mode ssd among these."""
    ks = [k for mode, k in engines if mode == "ssd"]
    if not ks or not resolved.budgets:
        return {}
    structs = branch_structs(
        draft,
        slots=resolved.config.slots,
        k=max(ks),
        budgets=resolved.budgets,
        support=_support(resolved),
        tree=resolved.tree(max(ks)),
    )
    return {"branches": len(ks) * size_of(structs)}


def _tree_parts(
    resolved: Resolved, draft: OpenedModel, engines: Engines, size_of: Callable[[Any], int]
) -> Parts:
    """Of the engines of mode sd among these."""
    shape, count = resolved.tree(max(resolved.ks)), sum(mode == "sd" for mode, _ in engines)
    if shape is None or not count:
        return {}
    slots, support = resolved.config.slots, _support(resolved)
    structs = tree_structs(draft, slots=slots, shape=shape, support=support)
    return {"trees": count * size_of(structs)}


def _support(resolved: Resolved) -> int:
    """Ids of a q, of which there is one where the rule reads none."""
    return resolved.support if RULES[resolved.config.verify].ships_q else 1


def _check(resolved: Resolved, need: Need) -> None:
    if need.fits:
        return
    config, budgets = resolved.config, resolved.budgets
    branches = need.parts.get("branches")
    budget = f" with budget = {' and '.join(map(str, budgets))}" if branches else ""
    memory = f" and kv_memory = {config.kv_memory}" if config.kv_memory else ""
    raise InputError(
        f"slots = {config.slots} of context = {resolved.context}{budget}{memory} need "
        f"{in_bytes(need.total)} of memory ("
        + ", ".join(f"{part} {in_bytes(size)}" for part, size in need.parts.items() if size)
        + f"), {need.memory} has {in_bytes(need.limit)}; lower one of them"
        + (", or `proposal_support`" if branches else "")
        + (", or give one budget" if len(budgets) > 1 else "")
        + ", or use a smaller model or dtype"
    )


def in_bytes(size: int) -> str:
    """A size with its unit: "1.5 GiB", "36.0 MiB", "12 bytes"."""
    for unit, of_one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= of_one:
            return f"{size / of_one:.1f} {unit}"
    return f"{size} bytes"
