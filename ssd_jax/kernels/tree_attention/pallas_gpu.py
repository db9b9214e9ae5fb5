"""`tree_attention` on GPUs: the code around the Mosaic GPU kernels.

A kernel computes a softmax for each part of the pages, in the last one with the branches; XLA
merges them. `pallas_gpu_wgmma.py` is for Hopper, `pallas_gpu_mma.py` for any GPU from Ampere on.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import PageTable, Scratch, as_array
from ssd_jax.kernels.tree_attention import pallas_gpu_mma, pallas_gpu_wgmma
from ssd_jax.kernels.tree_attention.bounds import in_range, nan_where_invalid
from ssd_jax.kernels.tree_attention.pallas_gpu_merge import FOLDS, MAX_MERGED, merge, with_sinks
from ssd_jax.kernels.tree_attention.pallas_gpu_part import ROWS, Operands, Results, Window
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant

POSITIONS = 64
"""Page sizes are multiples of this."""
HEAD_DIMS = (64, 128, 256)
KERNELS = {"pallas_gpu": pallas_gpu_wgmma, "pallas_mma": pallas_gpu_mma}
"""Modules by the names of their backends."""

_FEW_TILES = 6  # tiles; for fewer queries parts are as for one
_MIN_PART = 1 << 15  # numbers of a part's keys, so that a part returns little against what it reads
_CORES = 132  # of an H100 or H200; a guess elsewhere costs time only


class Launch(NamedTuple):
    """How a kernel is called.

    Attributes:
      name: of the kernel, among `KERNELS`.
      parts: approximate number of parts that a prefix is dealt out to; None is enough to keep every
        core busy.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on a processor, in an interpreter.
    """

    name: str = "pallas_gpu"
    parts: int | None = None
    interpret: Any = None


_AS_USUAL = Launch()


class SeenPositions(NamedTuple):
    """What each query sees.

    Attributes:
      first: see `AttentionVariant.first_seen`.
      visible: positions of pages.
      paths: in the window; see `Scratch`.
    """

    first: Int32[Array, "B R"] | None
    visible: Int32[Array, "B R"]
    paths: Int32[Array, "B R 2"] | None


def why_not(head_dim: int, kv_pages: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot read pages [pages, kv_heads, page_size, width], in one line; None if
    they can."""
    page_size, width = kv_pages.shape[2:]
    if head_dim not in HEAD_DIMS or width != 2 * head_dim:
        sizes = ", ".join(map(str, HEAD_DIMS[:-1]))
        return (
            f"head_dim = {head_dim} in pages of width {width}: it needs {sizes} or "
            f"{HEAD_DIMS[-1]}, and twice that"
        )
    if page_size % POSITIONS:
        return f"page_size = {page_size}: it needs a multiple of {POSITIONS}"
    if kv_pages.dtype != jnp.bfloat16:
        return f"pages of {kv_pages.dtype.name}: it needs bfloat16"
    return None


def why_not_on(device: Any, name: str = "pallas_gpu") -> str | None:
    """Why a kernel does not run on a JAX device, in one line; None if it does."""
    capability = getattr(device, "compute_capability", "none")
    if capability in KERNELS[name].CAPABILITIES:
        return None
    others = [other for other, kernel in KERNELS.items() if capability in kernel.CAPABILITIES]
    hint = "".join(f"; {other} runs there" for other in others)
    return f"a device of compute capability {capability}: it needs {KERNELS[name].NEEDS}{hint}"


def tree_attention_pallas_gpu(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    variant: AttentionVariant = PLAIN,
    *,
    launch: Launch = _AS_USUAL,
    shards: HeadShards | None = None,
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention`, with products in the pages' dtype, softmax and sums in float32.

    Pages that no query sees are not read; their numbers in the table may be out of range.

    Args:
      shards: given if several devices share the heads.

    Raises:
      ValueError: the kernel cannot read the pages.
    """
    reason = why_not(q.shape[-1], kv_pages)
    if reason is not None:
        raise ValueError(f"attention by Pallas on a GPU does not take {reason}")
    page_table = as_array(page_table, len(q))
    first = variant.first_seen(visible, scratch)
    valid = in_range(kv_pages, page_table, visible, scratch, first)
    window = variant.window if isinstance(variant.window, int) else None
    static = dataclasses.replace(variant, window=window, sinks=None)
    attend = functools.partial(_attend, launch=launch, variant=static)
    if shards is not None:
        attend = shards.map(attend, (2, 1, None, None, 1, 0), result=2)
    page_table = jnp.clip(page_table, 0, len(kv_pages) - 1)
    branches, paths = variant.within(scratch) or (None, None)
    seen = SeenPositions(first, visible, paths)
    attended = attend(q, kv_pages, page_table, seen, branches, variant.sinks)
    return nan_where_invalid(attended, valid)


def _attend(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: Int32[Array, "B P"],
    seen: SeenPositions,
    branches: Shaped[Array, "B kv_heads entries M width"] | None,
    sinks: Float[Array, "heads"] | None,
    *,
    variant: AttentionVariant,
    launch: Launch,
) -> Float32[Array, "B R heads head_dim"]:
    """Attention for the heads of one device.

    Args:
      variant: without arrays.
    """
    batch, rows, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim)
    state = _softmax(grouped, kv_pages, page_table, seen, branches, variant, launch)
    tiled_sinks = AttentionVariant(sinks=sinks).tiled_sinks(kv_heads, rows * group)
    if tiled_sinks is not None:
        state = with_sinks(*state, tiled_sinks)
    _, total, output = state
    output /= jnp.where(total == 0, 1.0, total)
    output = output.reshape(batch, kv_heads, rows, group, head_dim)
    return output.transpose(0, 2, 1, 3, 4).reshape(batch, rows, heads, head_dim)


def _softmax(
    q: Float[Array, "B kv_heads Q head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: Int32[Array, "B P"],
    seen: SeenPositions,
    branches: Shaped[Array, "B kv_heads entries M width"] | None,
    variant: AttentionVariant,
    launch: Launch,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Calls the kernel, and merges what its parts return; see `merge`."""
    name, parts, interpret = launch
    kernel, (first, visible, paths) = KERNELS[name], seen
    scratch = None if branches is None or paths is None else Scratch(branches, paths)
    batch, kv_heads, queries, head_dim = q.shape
    block = math.gcd(kv_pages.shape[2], kernel.block(head_dim))
    tiles = pl.cdiv(queries, ROWS)
    groups = pl.cdiv(tiles, kernel.most_tiles(head_dim))
    tiles = pl.cdiv(tiles, groups)  # tiles of a group
    capacity = page_table.shape[1] * kv_pages.shape[2]
    # About the most positions that a query sees.
    reach = capacity
    if isinstance(variant.window, int):
        reach = min(capacity, variant.window + block)
    if parts is None:
        # The same for one token as for those of a verification.
        blocks = batch * kv_heads * (1 if groups * tiles <= _FEW_TILES else groups)
        concurrent_blocks = _CORES * kernel.PER_CORE
        useful_parts = min(pl.cdiv(reach * head_dim, _MIN_PART), MAX_MERGED * FOLDS)
        parts = max(1, min(concurrent_blocks // blocks, useful_parts))
    if parts > MAX_MERGED:
        parts -= parts % FOLDS
    padding = groups * tiles * ROWS - queries
    scaled = (q * variant.scale_for(head_dim)).astype(kv_pages.dtype)
    scaled = jnp.pad(scaled, ((0, 0), (0, 0), (0, padding), (0, 0)))
    visible = jnp.clip(visible, 0, capacity)

    def by_query(values: Int32[Array, "... R"]) -> Int32[Array, "... Q"]:
        repeated = jnp.repeat(values, queries // visible.shape[1], axis=-1)
        return jnp.pad(repeated, (*((0, 0),) * (values.ndim - 1), (0, padding)))

    M, paths, branches = _branch_operands(scratch, visible.shape, block, kv_pages)
    branch_blocks = 0 if scratch is None else branches.shape[2] // block
    sums = jax.ShapeDtypeStruct((parts, batch, kv_heads, queries + padding), jnp.float32)
    operands = Operands(
        page_table,
        jnp.max(visible, axis=1),
        jnp.min(visible, axis=1),
        scaled,
        by_query(visible),
        by_query(paths),
        kv_pages,
        branches,
    )

    if first is not None:
        first = jnp.clip(first, 0, capacity)
        start = jnp.minimum(jnp.min(first, axis=1), operands.length)
        window = Window(start, jnp.max(first, axis=1), by_query(first))
        operands = operands._replace(window=window)
    arrays, structure = jax.tree.flatten(operands)

    def body(*refs: Any) -> None:
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        results, scratch_refs = outputs[: len(Results._fields)], outputs[len(Results._fields) :]
        options = {"branch_blocks": branch_blocks, "M": M, "soft_cap": variant.soft_cap}
        options["interpret"] = interpret is not None
        with_structure = jax.tree.unflatten(structure, inputs)
        kernel.kernel(with_structure, Results(*results), *scratch_refs, **options)

    position_bytes = kv_pages.shape[1] * kv_pages.shape[3] * kv_pages.dtype.itemsize
    page_bytes = batch * reach * position_bytes
    bytes_accessed = page_bytes + sum(
        repeated.size * repeated.dtype.itemsize for repeated in (scaled, branches)
    )
    bytes_accessed += parts * batch * kv_heads * (queries + padding) * (head_dim + 2) * 4
    call = plgpu.kernel(
        body,
        out_type=(sums, sums, jax.ShapeDtypeStruct((*sums.shape, head_dim), jnp.float32)),
        scratch_types=kernel.scratch(tiles, block, head_dim, kv_pages.dtype, interpret),
        grid=(groups, batch * parts, kv_heads),
        grid_names=("tile", "part", "head"),
        num_threads=kernel.threads(tiles),
        thread_name="thread",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
        interpret=interpret,
    )
    # JAX does not tell XLA what such kernels cost.
    with jax.named_scope(f"bytes_accessed.{bytes_accessed}"):
        maximum, total, output = call(*arrays)
    state = maximum[..., None], total[..., None], output
    return merge(*(x[:, :, :, :queries] for x in state))


def _branch_operands(
    scratch: Scratch | None, rows: tuple[int, ...], block: int, pages: jax.Array
) -> tuple[int, Int32[Array, "2 B R"], Shaped[Array, "_ _ E width"]]:
    """The number of branches of a sequence, the branch and path of each query, and the branches'
    entries, padded to whole blocks, with zeros where no query sees them."""
    if scratch is None:
        no_paths = jnp.zeros((2, *rows), jnp.int32)
        return 1, no_paths, jnp.zeros((1, 1, block, pages.shape[3]), pages.dtype)
    batch, heads, entries, M, width = scratch.kv.shape
    kv = scratch.kv.reshape(batch, heads, entries * M, width).astype(pages.dtype)
    visible = jnp.any(scratch.visible(), axis=1)
    kv = jnp.where(visible[:, None, :, None], kv, jnp.zeros((), kv.dtype))
    kv = jnp.pad(kv, ((0, 0), (0, 0), (0, -(entries * M) % block), (0, 0)))
    return M, jnp.moveaxis(scratch.paths, -1, 0), kv
