"""`tree_attention` on GPUs: the code around the Mosaic GPU kernels.

A kernel computes a softmax for each part of the pages, in the last one with the branches; XLA
merges them. `pallas_gpu_wgmma.py` is for Hopper, `pallas_gpu_mma.py` for any GPU from Ampere on.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import PageTable, Scratch, as_array
from ssd_jax.kernels.tree_attention import pallas_gpu_mma, pallas_gpu_wgmma
from ssd_jax.kernels.tree_attention.bounds import in_range, nan_where_invalid
from ssd_jax.kernels.tree_attention.pallas_gpu_part import LOWEST, ROWS, Operands, Results

POSITIONS = 64
"""Page sizes are multiples of this."""
HEAD_DIMS = (64, 128)
KERNELS = {"pallas_gpu": pallas_gpu_wgmma, "pallas_mma": pallas_gpu_mma}
"""Modules by the names of their backends."""

_FEW_TILES = 6  # tiles; for fewer queries parts are as for one
_MIN_PART = 1 << 15  # numbers of a part's keys, so that a part returns little against what it reads
_MAX_MERGED, _FOLDS = 16, 8  # most parts merged at once; number of parts that more are folded into
_CORES = 132  # of an H100 or H200; a guess elsewhere costs time only


def why_not(head_dim: int, kv_pages: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot read pages [pages, kv_heads, page_size, width], in one line; None if
    they can."""
    page_size, width = kv_pages.shape[2:]
    if head_dim not in HEAD_DIMS or width != 2 * head_dim:
        sizes = " or ".join(map(str, HEAD_DIMS))
        return f"head_dim = {head_dim} in pages of width {width}: it needs {sizes}, and twice that"
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
    *,
    name: str = "pallas_gpu",
    parts: int | None = None,
    shards: HeadShards | None = None,
    interpret: Any = None,
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention`, with products in the pages' dtype, softmax and sums in float32.

    Pages that no query sees are not read; their numbers in the table may be out of range.

    Args:
      name: of the kernel, among `KERNELS`.
      parts: approximate number of parts that a prefix is dealt out to; None is enough to keep every
        core busy.
      shards: given if several devices share the heads.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on a processor, in an interpreter.

    Raises:
      ValueError: the kernel cannot read the pages.
    """
    reason = why_not(q.shape[-1], kv_pages)
    if reason is not None:
        raise ValueError(f"attention by Pallas on a GPU does not take {reason}")
    page_table = as_array(page_table, len(q))
    valid = in_range(kv_pages, page_table, visible, scratch)
    attend = functools.partial(_attend, name=name, parts=parts, interpret=interpret)
    if shards is not None:
        attend = shards.map(attend, (2, 1, None, None, 1, None), result=2)
    page_table = jnp.clip(page_table, 0, len(kv_pages) - 1)
    branches, paths = scratch or (None, None)
    return nan_where_invalid(attend(q, kv_pages, page_table, visible, branches, paths), valid)


def _attend(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: Int32[Array, "B P"],
    visible: Int32[Array, "B R"],
    branches: Shaped[Array, "B kv_heads entries M width"] | None,
    paths: Int32[Array, "B R 2"] | None,
    *,
    name: str,
    parts: int | None,
    interpret: Any,
) -> Float32[Array, "B R heads head_dim"]:
    """Attention for the heads of one device."""
    batch, rows, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim)
    scratch = None if branches is None or paths is None else Scratch(branches, paths)
    output = _softmax(grouped, kv_pages, page_table, visible, scratch, name, parts, interpret)
    output = output.reshape(batch, kv_heads, rows, group, head_dim)
    return output.transpose(0, 2, 1, 3, 4).reshape(batch, rows, heads, head_dim)


def _softmax(
    q: Float[Array, "B kv_heads Q head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size width"],
    page_table: Int32[Array, "B P"],
    visible: Int32[Array, "B R"],
    scratch: Scratch | None,
    name: str,
    parts: int | None,
    interpret: Any,
) -> Float32[Array, "B kv_heads Q head_dim"]:
    """Calls the kernel, and merges what its parts return."""
    kernel = KERNELS[name]
    batch, kv_heads, queries, head_dim = q.shape
    block = math.gcd(kv_pages.shape[2], kernel.BLOCK // head_dim)
    tiles = pl.cdiv(queries, ROWS)
    groups = pl.cdiv(tiles, kernel.TILES)
    tiles = pl.cdiv(tiles, groups)  # tiles of a group
    capacity = page_table.shape[1] * kv_pages.shape[2]
    if parts is None:
        # The same for one token as for those of a verification.
        blocks = batch * kv_heads * (1 if groups * tiles <= _FEW_TILES else groups)
        concurrent_blocks = _CORES * kernel.PER_CORE
        useful_parts = min(pl.cdiv(capacity * head_dim, _MIN_PART), _MAX_MERGED * _FOLDS)
        parts = max(1, min(concurrent_blocks // blocks, useful_parts))
    if parts > _MAX_MERGED:
        parts -= parts % _FOLDS
    padding = groups * tiles * ROWS - queries
    scaled = (q * head_dim**-0.5).astype(kv_pages.dtype)
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

    def body(*refs: Any) -> None:
        inputs, outputs = refs[: len(operands)], refs[len(operands) :]
        results, scratch_refs = outputs[: len(Results._fields)], outputs[len(Results._fields) :]
        options = {"branch_blocks": branch_blocks, "M": M, "interpret": interpret is not None}
        kernel.kernel(Operands(*inputs), Results(*results), *scratch_refs, **options)

    page_bytes = page_table.size * math.prod(kv_pages.shape[1:]) * kv_pages.dtype.itemsize
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
        maximum, total, output = call(*operands)
    state = maximum[..., None], total[..., None], output
    _, total, output = _merge(*(x[:, :, :, :queries] for x in state))
    return output / jnp.where(total == 0, 1.0, total)


def _merge(
    maximum: Float32[Array, "parts *rows 1"],
    total: Float32[Array, "parts *rows 1"],
    output: Float32[Array, "parts *rows head_dim"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the softmaxes of parts, with maxima of powers of two, into one.

    A few are written out, so that XLA's kernels wait for reads only once. Many are merged in two
    steps, each of which has a thread for every number that it writes.
    """
    if len(maximum) > _MAX_MERGED:
        groups = [x.reshape(_FOLDS, -1, *x.shape[1:]) for x in (maximum, total, output)]
        return _merge_by_reduction(*_merge_by_reduction(*(x.swapaxes(0, 1) for x in groups)))
    merged_maximum = functools.reduce(jnp.maximum, maximum)
    weights = [jnp.exp2(part - merged_maximum) for part in maximum]

    def weighted_sum(values: jax.Array) -> jax.Array:
        terms = [weight * part for weight, part in zip(weights, values, strict=True)]
        return functools.reduce(jnp.add, terms)

    return merged_maximum, weighted_sum(total), weighted_sum(output)


def _merge_by_reduction(
    maximum: Float32[Array, "parts *rows _"],
    total: Float32[Array, "parts *rows _"],
    output: Float32[Array, "parts *rows head_dim"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_merge`, by one reduction, of which each result has the output's shape."""

    def add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        merged_maximum = jnp.maximum(left[0], right[0])
        left_scale, right_scale = (
            jnp.exp2(left[0] - merged_maximum),
            jnp.exp2(right[0] - merged_maximum),
        )
        sums = (a * left_scale + b * right_scale for a, b in zip(left[1:], right[1:], strict=True))
        return merged_maximum, *sums

    state = tuple(jnp.broadcast_to(x, output.shape) for x in (maximum, total, output))
    identity = jnp.float32(LOWEST), jnp.float32(0), jnp.float32(0)
    return lax.reduce(state, identity, add, (0,))


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
