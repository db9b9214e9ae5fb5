"""Checks on the arguments of every `tree_attention`: shapes that fit each other, and pages and
paths that exist."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.kv_pages import (
    MAX_ENTRIES,
    Contiguous,
    PageArray,
    PageTable,
    Scratch,
    as_array,
)
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant


def check_shapes(
    q: jax.Array,
    kv_pages: jax.Array,
    page_table: jax.Array | Contiguous,
    visible: jax.Array,
    scratch: Scratch | None,
    variant: AttentionVariant = PLAIN,
) -> None:
    """Checks shapes, and numbers of the variant that are known while a program is traced.

    Raises:
      ValueError: some shapes do not fit, or a number makes no sense.
    """
    batch, rows, heads, head_dim = q.shape
    kv_heads, width = kv_pages.shape[1], kv_pages.shape[3]
    page_table = as_array(page_table, batch)
    problems = {
        f"{heads} query heads are no multiple of {kv_heads} key/value heads": heads % kv_heads,
        f"pages of width {width} have no keys beside values of head_dim = {head_dim}": (
            width % 2 or width < 2 * head_dim
        ),
        f"page_table {page_table.shape} has not {batch} rows": len(page_table) != batch,
        f"visible {visible.shape} is not {(batch, rows)}": visible.shape != (batch, rows),
    }
    if scratch is not None:
        branches, paths = scratch
        expected = (batch, kv_heads, *branches.shape[2:4], width)
        entries = branches.shape[2]
        problems |= {
            f"branches {branches.shape} are not {expected}": branches.shape != expected,
            f"paths {paths.shape} are not {(batch, rows, 2)}": paths.shape != (batch, rows, 2),
            f"{entries} entries a branch: at most {MAX_ENTRIES}": entries > MAX_ENTRIES,
        }
    for name in ("window", "soft_cap", "scale"):
        value = getattr(variant, name)
        if isinstance(value, int | float):
            problems[f"{name} = {value} is not above 0"] = not value > 0
    if variant.sinks is not None:
        shape = variant.sinks.shape
        problems[f"sinks {shape} are not {(heads,)}"] = shape != (heads,)
    for problem, present in problems.items():
        if present:
            raise ValueError(problem)


def in_range(
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None,
    first: Int32[Array, "B R"] | None = None,
) -> Bool[Array, "B R"]:
    """Whether everything that a query sees exists.

    Args:
      first: see `AttentionVariant.first_seen`.
    """
    reach = page_table.reach if isinstance(page_table, Contiguous) else None
    page_table = as_array(page_table, len(visible))
    page_size, count = kv_pages.shape[2], page_table.shape[1]
    page_start = jnp.arange(count) * page_size
    lower = jnp.broadcast_to(0 if first is None else first, visible.shape)
    page_seen = (page_start < visible[..., None]) & (page_start + page_size > lower[..., None])
    page_exists = (page_table >= 0) & (page_table < len(kv_pages))
    valid = jnp.all(~page_seen | page_exists[:, None], axis=-1) & (
        visible <= (reach or count * page_size)
    )
    if scratch is not None:
        branch, path = jnp.moveaxis(scratch.paths, -1, 0)
        entries, branches = scratch.kv.shape[2:4]
        valid &= (branch >= 0) & (branch < branches) & (path >> entries == 0)
    return valid


def nan_where_invalid(
    attended: Float32[Array, "B R heads head_dim"], valid: Bool[Array, "B R"]
) -> Float32[Array, "B R heads head_dim"]:
    """Attention, with NaN for queries that see something that is not `in_range`."""
    return jnp.where(valid[:, :, None, None], attended, jnp.nan)
