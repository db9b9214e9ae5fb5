"""How many KV cache pages slots share: as configured, or as many as the memory has room for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from ssd_jax.config.config import Config
from ssd_jax.devices.opening.fit import Need
from ssd_jax.devices.opening.models import check_paging
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.errors import InputError
from ssd_jax.kernels import kv_pages
from ssd_jax.loading.memory import in_bytes, needs
from ssd_jax.loading.resolved import Resolved

NeedsOf = Callable[[Paging], Sequence[Need]]
"""What everything needs with so many pages, of each memory."""


def paging_of(resolved: Resolved) -> Paging | None:
    """The pages that slots share, as configured; None if each slot has a page of its own.

    Raises:
      InputError: too little memory for one sequence, memory that is not known, or pages that
        attention cannot read.
    """
    config, context = resolved.config, resolved.context
    if config.kv_memory is None and config.page_size is None:
        return None
    models = [opened.model for opened in (resolved.target, resolved.draft) if opened is not None]
    size, groups = config.page_size or kv_pages.BLOCK, resolved.target.model.data_shards
    per_slot = -(-context // size)
    for model in models:
        check_paging(model, size, slots=config.slots, context=context)
    if config.kv_memory is None:
        return Paging(size, config.slots * per_slot)
    if config.kv_share is None:
        pages = jax.tree.leaves([model.page_struct(1, size) for model in models])
        # On all devices together.
        page_bytes = sum(page.size * page.dtype.itemsize for page in pages)
        count = config.kv_bytes // page_bytes // groups * groups
        memory = in_bytes(per_slot * page_bytes)
    else:

        def needs_of(paging: Paging) -> list[Need]:
            return needs(dataclasses.replace(resolved, paging=paging), resolved.engines)

        count = most_pages(config, size, groups, needs_of)
        count = min(count, config.slots * per_slot)  # more could only keep what nobody uses
        memory = "beside weights and all else"
    if count // groups < per_slot:
        shared = f", {count // groups} for each of {groups} groups of devices" * (groups > 1)
        raise InputError(
            f"kv_memory = {config.kv_memory} holds {count} pages of {size} positions{shared}, and "
            f"a sequence of context = {context} needs {per_slot} ({memory}); raise it, or lower "
            "`context`"
        )
    return Paging(size, count)


def most_pages(config: Config, size: int, groups: int, needs_of: NeedsOf) -> int:
    """The most pages with which everything stays within the configured share of every memory.

    Programs are not counted, since they are not compiled yet: the rest of the share is theirs.

    Args:
      size: positions a page.
      groups: number of groups of devices, which have equally many pages.

    Returns: a multiple of `groups`, at least 0.

    Raises:
      InputError: the memory of the target's devices is not known.
    """
    share = config.kv_share
    assert share is not None
    base, doubled = needs_of(Paging(size, groups)), needs_of(Paging(size, 2 * groups))
    if jax.default_backend() != "cpu" and not any("of the target" in need.memory for need in base):
        raise InputError(
            f"kv_memory = {config.kv_memory}: the target's devices do not report how much memory "
            "they have; give a size such as 4GiB"
        )
    counts = []
    for base_need, doubled_need in zip(base, doubled, strict=True):
        base_total = base_need.total
        page_bytes = doubled_need.total - base_total  # of a page in every group
        if page_bytes:
            counts.append(1 + (int(base_need.limit * share) - base_total) // page_bytes)
    return max(min(counts), 0) * groups
