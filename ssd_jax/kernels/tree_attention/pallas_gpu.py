"""`tree_attention` on GPUs: what surrounds the Mosaic GPU kernel of `pallas_gpu_kernel.py`.

The kernel has the pages' part of the softmax; its states are merged, and the branches added, in
plain XLA.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ssd_jax.kernels.kv_pages import PageTable, Scratch, as_array
from ssd_jax.kernels.tree_attention.bounds import in_range, known
from ssd_jax.kernels.tree_attention.pallas_gpu_kernel import ROWS, kernel
from ssd_jax.kernels.tree_attention.xla import Softmax, add_branches, normalise

POSITIONS = 64
"""Pages have a multiple of these."""
HEAD_DIMS = (64, 128)
CAPABILITY = "9.0"
"""Of GPUs that have its products (wgmma): Hopper's; neither Ampere's nor Blackwell's."""

_MOST = 128  # positions a product
_CORES = 132  # of an H100; a guess elsewhere costs time only


def why_not(head_dim: int, kv_pages: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """None where the kernel can read such pages [pages, kv_heads, page_size, width]; else why it
    cannot, in one line."""
    page_size, width = kv_pages.shape[2:]
    if head_dim not in HEAD_DIMS or width != 2 * head_dim:
        sizes = " or ".join(map(str, HEAD_DIMS))
        return f"head_dim = {head_dim} in pages of width {width}: it needs {sizes}, and twice that"
    if page_size % POSITIONS:
        return f"page_size = {page_size}: it needs a multiple of {POSITIONS}"
    if kv_pages.dtype != jnp.bfloat16:
        return f"pages of {kv_pages.dtype.name}: it needs bfloat16"
    return None


def why_not_on(device: Any) -> str | None:
    """None where a JAX device has the instructions of the kernel; else which it lacks."""
    capability = getattr(device, "compute_capability", "none")
    if capability == CAPABILITY:
        return None
    return f"a device of compute capability {capability}: it needs {CAPABILITY} (H100, H200)"


def tree_attention_pallas_gpu(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    *,
    parts: int | None = None,
    interpret: Any = None,
) -> Float32[Array, "B R heads head_dim"]:
    """See `api.tree_attention`. Products in the pages' dtype, softmax and sums in float32.

    Pages that no query sees are not read; where they are named in the table, their numbers may be
    out of range.

    Args:
      parts: that a prefix is cut into, for blocks of the grid to share; None is as many as give
        every core one.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on a processor, as an interpreter.

    Raises:
      ValueError: pages that the kernel cannot read.
    """
    batch, rows, heads, head_dim = q.shape
    reason = why_not(head_dim, kv_pages)
    if reason is not None:
        raise ValueError(f"attention by Pallas on a GPU does not take {reason}")
    page_table = as_array(page_table, batch)
    kv_heads = kv_pages.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim)
    state = _prefix(grouped, kv_pages, page_table, visible, parts, interpret)
    if scratch is not None:
        state = add_branches(state, grouped, scratch, group, head_dim**-0.5)
    output = normalise(state).reshape(batch, kv_heads, rows, group, head_dim)
    output = output.transpose(0, 2, 1, 3, 4).reshape(batch, rows, heads, head_dim)
    return known(output, in_range(kv_pages, page_table, visible, scratch))


def _prefix(
    q: Float[Array, "B kv_heads Q head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: Int32[Array, "B P"],
    visible: Int32[Array, "B R"],
    parts: int | None,
    interpret: Any,
) -> Softmax:
    """Calls the kernel, and merges what its parts return."""
    batch, kv_heads, queries, head_dim = q.shape
    block = math.gcd(kv_pages.shape[2], _MOST)
    tiles = pl.cdiv(queries, ROWS)
    capacity = page_table.shape[1] * kv_pages.shape[2]
    if parts is None:
        parts = max(1, min(_CORES // (batch * kv_heads * tiles), capacity // block))
    padding = tiles * ROWS - queries
    scaled = (q * head_dim**-0.5).astype(kv_pages.dtype)
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, padding), (0, 0)))
    visible = jnp.clip(visible, 0, capacity)
    seen = jnp.repeat(visible, queries // visible.shape[1], axis=1)
    seen = jnp.pad(seen, ((0, 0), (0, padding)))
    swizzle = 128
    transforms = (
        plgpu.TilingTransform((8, swizzle // kv_pages.dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    memory = functools.partial(plgpu.SMEM, dtype=kv_pages.dtype, transforms=transforms)
    sums = jax.ShapeDtypeStruct((parts, batch, kv_heads, tiles * ROWS), jnp.float32)
    maximum, total, output = plgpu.kernel(
        functools.partial(kernel, parts=parts),
        out_type=(sums, sums, jax.ShapeDtypeStruct((*sums.shape, head_dim), jnp.float32)),
        scratch_types=[
            memory((ROWS, head_dim)),
            memory((2, block, head_dim)),
            memory((2, block, head_dim)),
            memory((ROWS, block)),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        grid=(tiles, batch * parts, kv_heads),
        grid_names=("tile", "part", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(
        jnp.clip(page_table, 0, len(kv_pages) - 1),
        jnp.max(visible, axis=1),
        scaled,
        seen,
        kv_pages,
    )
    maximum, total, output = (each[:, :, :, :queries] for each in (maximum, total, output))
    highest = jnp.max(maximum, axis=0)
    weights = jnp.exp(maximum - highest)
    return Softmax(
        highest,
        jnp.sum(weights * total, axis=0)[..., None],
        jnp.sum(weights[..., None] * output, axis=0),
    )
