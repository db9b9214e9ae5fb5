"""Checks that sequences fit the models' contexts, and everything fits memory.

Weights, keys and values, histories, prepared branches and running programs are counted, since a
process that asks for more memory than there is is killed without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ssd_jax.config.config import Config
from ssd_jax.config.settings import DEFAULT_CONTEXT, SUPPORT
from ssd_jax.devices.paged_programs import Paging, page_size
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

if TYPE_CHECKING:
    from ssd_jax.devices.opened import OpenedModel
    from ssd_jax.placement.placement import Placement

Parts = dict[str, int]
"""Bytes by their use."""


class Need(NamedTuple):
    """The parts that one memory must hold.

    Attributes:
      limit: bytes that it may hold.
      whose: name of the memory, for messages.
    """

    parts: Parts
    limit: int
    whose: str


def fitting_context(config: Config, limits: Mapping[str, int], ks: Sequence[int]) -> int:
    """Positions of a sequence: as configured, or the most that all models were made for.

    Args:
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
            f"{least} was made for; lower `context`"
        )
    most = max(ks, default=0)
    if context < 2:
        raise InputError(f"context = {context} has no room for a prompt token and one more")
    if most > context - 2:
        raise InputError(
            f"k = {most} does not fit a context of {context}, which must "
            "hold a prompt token and a pending one beside; lower `k` or raise `context`"
        )
    return context


def cut_lines(
    config: Config, context: int, target: OpenedModel, draft: OpenedModel | None
) -> list[str]:
    """A line where the draft's context is what makes a default context as short as it is."""
    without = min(DEFAULT_CONTEXT, target.checkpoint.config.max_context)
    if config.context is not None or draft is None or context >= without:
        return []
    return [
        f"context = {context}, and not {without}, since the draft {draft.source} was made for "
        f"no more; `mode='ar'`, another draft or `draft='ngram'` allows more"
    ]


def needs(
    config: Config,
    target: OpenedModel,
    draft: OpenedModel | None,
    context: int,
    *,
    placement: Placement,
    engines: Sequence[tuple[str, int]],
    programs: Mapping[str, int] = MappingProxyType({}),
    paging: Paging | None = None,
) -> list[Need]:
    """What engines need of this machine's memory, and of each device that reports its memory.

    Args:
      placement: of the draft; a process of its own is also on this machine.
      engines: (mode, K) of each; each has slots of its own.
      programs: see `Loaded.room`, as far as it is known.
      paging: see `PagedPrograms`.
    """
    roles = config, target, draft, paging or Paging(page_size(context), config.slots), programs
    limit, whose = memory_limit()
    found = [Need(_host_parts(*roles, placement=placement, engines=engines), limit, whose)]
    for role, parts in _device_parts(*roles, placement=placement, engines=engines).items():
        opened = target if role == "target" else draft
        limit = None if opened is None else device_limit(opened)
        if limit is not None:
            found.append(Need(parts, limit, f"each device of the {role}"))
    return found


def _device_parts(
    config: Config,
    target: OpenedModel,
    draft: OpenedModel | None,
    paging: Paging,
    programs: Mapping[str, int],
    *,
    placement: Placement,
    engines: Sequence[tuple[str, int]],
) -> dict[str, Parts]:
    """By role, what each of its accelerators holds; a draft on the target's is counted there."""
    if jax.default_backend() == "cpu":
        return {}
    count = functools.partial(_count, config, paging, bytes_per_device)
    parts = count("target", target, pages=len(engines), records=len(engines))
    parts["its programs"] = programs.get("target", 0)
    found = {"target": parts}
    here = [
        (mode, k) for mode, k in engines if mode == "sd" or (mode == "ssd" and not placement.apart)
    ]
    if draft is None or not here:
        return found
    own = found.setdefault("draft", {}) if placement.kind == "submesh" else parts
    own |= count("draft", draft, pages=len(here), records=len(here))
    own["the draft's programs"] = programs.get("draft", 0)
    ks = [k for mode, k in here if mode == "ssd"]
    if config.branches and ks:
        own["branches"] = len(ks) * bytes_per_device(_branches(config, draft, max(ks)))
    return found


def _host_parts(
    config: Config,
    target: OpenedModel,
    draft: OpenedModel | None,
    paging: Paging,
    programs: Mapping[str, int],
    *,
    placement: Placement,
    engines: Sequence[tuple[str, int]],
) -> Parts:
    on_host = jax.default_backend() == "cpu"
    count = functools.partial(_count, config, paging, bytes_of_process)
    parts: Parts = {}
    if on_host:
        parts |= count("target", target, pages=len(engines), records=len(engines))
        parts["its programs"] = devices_of_process(target) * programs.get("target", 0)
    drafting = [mode for mode, _ in engines if mode != "ar"]
    if draft is None or not (drafting or config.prepared == "ssd"):
        return parts
    # No other process can measure the memory of a draft's process on GPUs of its own.
    apart = placement.kind == "process" and placement.workers[0].platform == "cpu"
    here, layout = on_host and not placement.apart, placement.layout
    copies = apart * layout.workers + (here or (on_host and "sd" in drafting))
    # A worker has pages for its own slots only, but all pages where slots share them.
    shared = config.kv_memory is not None or config.page_size is not None

    def held(of_workers: int) -> int:
        return sum(
            of_workers if mode == "ssd" and apart else on_host and (mode == "sd" or here)
            for mode in drafting
        )

    pages = held(layout.workers if shared else layout.parts)
    parts |= count("draft", draft, weights=copies, pages=pages, records=held(layout.parts))
    if on_host:
        parts["the draft's programs"] = devices_of_process(draft) * programs.get("draft", 0)
    ks = [k for mode, k in engines if mode == "ssd"]
    if config.branches and ks and (here or apart):
        parts["branches"] = len(ks) * bytes_of_process(_branches(config, draft, max(ks)))
    return parts


def _count(
    config: Config,
    paging: Paging,
    size_of: Callable[[Any], int],
    role: str,
    opened: OpenedModel,
    *,
    weights: int = 1,
    pages: int,
    records: int,
) -> Parts:
    """Bytes of so many copies of a role's weights, of its pages and of its histories."""
    whose, model = "its" if role == "target" else "the draft's", opened.model
    of_pages = model.page_struct(paging.total, paging.size)
    return {
        f"weights of the {role}": weights * size_of(model.parameter_structs()),
        f"{whose} keys and values": pages * size_of(of_pages),
        f"{whose} records of past tokens": records * size_of(history_structs(model, config.slots)),
    }


def _branches(config: Config, draft: OpenedModel, k: int) -> Any:
    support = SUPPORT if config.proposal_support is None else config.proposal_support
    return branch_structs(
        draft,
        slots=config.slots,
        k=k,
        budgets=config.budgets,
        support=draft.model.config.outputs if support == "full" else int(support),
    )


def check_fits(config: Config, context: int, need: Need) -> None:
    """Refuses a need that does not fit.

    Raises:
      InputError: the parts together are more than the memory may hold.
    """
    parts, limit, whose = need
    needed = sum(parts.values())
    if needed <= limit:
        return
    branches = parts.get("branches")
    budget = f" with budget = {' and '.join(map(str, config.budgets))}" if branches else ""
    given = f" and kv_memory = {config.kv_memory}" if config.kv_memory else ""
    raise InputError(
        f"slots = {config.slots} of context = {context}{budget}{given} need {in_bytes(needed)} of "
        "memory ("
        + ", ".join(f"{what} {in_bytes(size)}" for what, size in parts.items() if size)
        + f"), {whose} has {in_bytes(limit)}; lower one of them"
        + (", or `proposal_support`" if branches else "")
        + (", or give one budget" if len(config.budgets) > 1 else "")
        + ", or use a smaller model or dtype"
    )


def in_bytes(size: int) -> str:
    """A size with its unit: "1.5 GiB", "36.0 MiB", "12 bytes"."""
    for unit, of_one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= of_one:
            return f"{size / of_one:.1f} {unit}"
    return f"{size} bytes"
