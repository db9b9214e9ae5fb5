"""`tree_attention` on TPUs: the code around the Pallas kernel of `pallas_tpu_kernel.py`.

It lays out queries by key/value head, chooses the sizes of tiles, and checks arguments.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.core
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import LANES, PageTable, Scratch, as_array, lane_width
from ssd_jax.kernels.tree_attention.bounds import in_range, nan_where_invalid
from ssd_jax.kernels.tree_attention.pallas_tpu_kernel import Options, Tiles, kernel
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant

POSITIONS = 16
"""Page sizes are multiples of this, the least that a copy of bfloat16 moves."""
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))

_TABLE_BYTES = 512 << 10  # of scalar memory
_SLOT_BYTES = 2 << 20  # of one block of positions; two are in memory
_QUERY_BYTES = 8 << 20  # of queries, results and states of the softmax
_PRODUCT_ROWS = 256


def why_not(head_dim: int, kv_pages: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernel cannot read pages [pages, kv_heads, page_size, lanes], in one line; None if
    it can."""
    page_size, width = kv_pages.shape[2:]
    if width % LANES or width < 2 * head_dim:
        return f"{width} lanes for head_dim = {head_dim}: it needs {lane_width(head_dim)}"
    if page_size % POSITIONS:
        return f"page_size = {page_size}: it needs a multiple of {POSITIONS}"
    if kv_pages.dtype not in DTYPES:
        names = " or ".join(dtype.name for dtype in DTYPES)
        return f"pages of {kv_pages.dtype.name}: it needs {names}"
    return None


def why_no_table(rows: int, pages: int) -> str | None:
    """Why the page table of `rows` sequences with `pages` pages does not fit; None if it does."""
    size = 4 * rows * pages
    if size <= _TABLE_BYTES:
        return None
    return f"a page_table of {rows} x {pages} takes {size} bytes; the limit is {_TABLE_BYTES}"


def tree_attention_pallas_tpu(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    variant: AttentionVariant = PLAIN,
    *,
    shards: HeadShards | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention`, with products in the pages' dtype, softmax and sums in float32.

    Pages that no query sees are not read; their numbers in the table may be out of range.

    Args:
      kv_pages: a key takes the first head_dim of the first half of the lanes, its value those of
        the second half, and the rest is 0. There are `lanes(head_dim)` lanes; page_size is a
        multiple of `POSITIONS`, and the dtype is one of `DTYPES`.
      scratch: laid out likewise; all of it is finite, even what no query sees.
      shards: given if several devices share the heads.
      interpret: runs the kernel on a processor, in an interpreter.

    Raises:
      ValueError: the kernel cannot read the pages, or their table is too large; or, for concrete
        arguments, something is out of range.
    """
    page_table = as_array(page_table, len(q))
    _check(q, kv_pages, page_table)
    in_window = variant.within(scratch)
    branches, paths = in_window or (None, None)
    limits = _limits(visible, paths, variant.first_seen(visible, scratch))
    valid = in_range(kv_pages, page_table, visible, scratch, limits[..., 0])
    if not isinstance(valid, jax.core.Tracer) and not valid.all():
        raise ValueError(_out_of_range(kv_pages, page_table, branches))
    count = 0 if branches is None else branches.shape[3]
    scale, sinks = variant.scale_for(q.shape[3]), variant.sinks
    options = Options(count, scale, variant.soft_cap, sinks is not None)
    reach = variant.mean_reach(page_table.shape[1] * kv_pages.shape[2])
    attend = functools.partial(_attend, options=options, reach=reach, interpret=interpret)
    if shards is not None:
        attend = shards.map(attend, (2, 1, None, None, 1, 0), result=2)
    page_table = jnp.clip(page_table, 0, len(kv_pages) - 1)
    attended = attend(q, kv_pages, page_table, limits, branches, sinks)
    return nan_where_invalid(attended, valid)


def _cost(
    grouped: Float[Array, "B kv_heads Q _"],
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page_table: Int32[Array, "B P"],
    reach: float,
) -> pl.CostEstimate:
    """The cost if queries see `reach` positions of their sequence's pages: an estimate without
    knowing lengths."""
    positions = round(len(page_table) * reach)
    keys = positions * kv_pages.shape[1] * kv_pages.shape[3]
    scores = positions * grouped.shape[1] * grouped.shape[2]
    bytes_accessed = keys * kv_pages.dtype.itemsize + grouped.size * (grouped.dtype.itemsize + 4)
    return pl.CostEstimate(
        flops=2 * grouped.shape[2] * keys, bytes_accessed=bytes_accessed, transcendentals=scores
    )


def _attend(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page_table: Int32[Array, "B P"],
    limits: Int32[Array, "B R 4"],
    branches: Shaped[Array, "B kv_heads entries M lanes"] | None,
    sinks: Float[Array, "heads"] | None,
    *,
    options: Options,
    reach: float,
    interpret: bool | pltpu.InterpretParams,
) -> Float32[Array, "B R heads head_dim"]:
    """Calls the kernel for the heads of one device; see `_cost`."""
    batch, rows, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[1]
    group = heads // kv_heads
    tiles = _tiles(q, kv_pages, page_table, sinks=options.sinks)
    half = kv_pages.shape[3] // 2
    query_lanes = half if half % LANES == 0 else 2 * half  # lanes of a query and its result
    padding = tiles.per_sequence * tiles.rows - rows * group
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim).astype(kv_pages.dtype)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padding), (0, query_lanes - head_dim)))
    row_limits = jnp.repeat(limits, group, axis=1)
    row_limits = jnp.pad(row_limits, ((0, 0), (0, padding), (0, 0)))
    capacity = page_table.shape[1] * kv_pages.shape[2]
    first, length = _ranges(row_limits.reshape(batch * tiles.per_sequence, tiles.rows, 4), capacity)
    operands = [grouped, row_limits]
    q_block = pl.BlockSpec(
        (1, tiles.heads, tiles.rows, query_lanes), lambda h, b, t, *_: (b, h, t, 0)
    )
    specs = [q_block, pl.BlockSpec((1, tiles.rows, 4), lambda h, b, t, *_: (b, t, 0))]
    if branches is not None:
        flat = branches.reshape(batch, kv_heads, -1, 2 * half)
        operands.append(flat)
        shape = (1, tiles.heads, *flat.shape[2:])
        specs.append(pl.BlockSpec(shape, lambda h, b, t, *_: (b, h, 0, 0)))
    tiled_sinks = AttentionVariant(sinks=sinks).tiled_sinks(kv_heads, rows * group)
    if tiled_sinks is not None:
        operands.append(jnp.pad(tiled_sinks, ((0, 0), (0, padding)))[..., None])
        shape = (tiles.heads, tiles.rows, 1)
        specs.append(pl.BlockSpec(shape, lambda h, b, t, *_: (h, t, 0)))
    slots = (2, tiles.heads, tiles.block, 2 * half)
    sums = pltpu.VMEM((tiles.heads, tiles.rows, 1), jnp.float32)
    attended = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, options=options),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // tiles.heads, batch, tiles.per_sequence),
            in_specs=[*specs, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=q_block,
            scratch_shapes=[
                pltpu.VMEM(slots, kv_pages.dtype),
                sums,
                sums,
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=_cost(grouped, kv_pages, page_table, reach),
        interpret=interpret,
        name="tree_attention",
    )(page_table, first, length, *operands, kv_pages)
    attended = attended[:, :, : rows * group, query_lanes - half : query_lanes - half + head_dim]
    attended = attended.reshape(batch, kv_heads, rows, group, head_dim).transpose(0, 2, 1, 3, 4)
    return attended.reshape(batch, rows, heads, head_dim)


def _limits(
    visible: Int32[Array, "B R"],
    paths: Int32[Array, "B R 2"] | None,
    first: Int32[Array, "B R"] | None,
) -> Int32[Array, "B R 4"]:
    """[first position, end, branch, path] of what each query sees.

    Args:
      paths: in the window; see `Scratch`.
      first: see `AttentionVariant.first_seen`.
    """
    if paths is None:
        paths = jnp.zeros((*visible.shape, 2), jnp.int32)
    branch, path = paths[..., 0], paths[..., 1]
    lower = jnp.zeros_like(visible) if first is None else jnp.minimum(first, visible)
    return jnp.stack([lower, visible, branch, path], axis=-1)


def _ranges(
    limits: Int32[Array, "steps rows 4"], capacity: int
) -> tuple[Int32[Array, "steps_and_1"], Int32[Array, "steps_and_1"]]:
    """Positions [first, length) that some query of each step sees; an empty range at the end."""
    lower, visible = limits[..., 0], limits[..., 1]
    length = jnp.clip(jnp.max(visible, axis=1), 0, capacity)
    first = jnp.min(jnp.where(lower < visible, lower, capacity), axis=1)
    first = jnp.minimum(first, length)
    return jnp.pad(first, (0, 1)), jnp.pad(length, (0, 1))


def _out_of_range(kv_pages: jax.Array, page_table: jax.Array, branches: jax.Array | None) -> str:
    pages, _, page_size, _ = kv_pages.shape
    limits = f"page_table has pages 0 to {pages - 1}"
    limits += f", visible is up to {page_table.shape[1] * page_size}"
    if branches is not None:
        entries, count = branches.shape[2:4]
        limits += f", paths have branches 0 to {count - 1} and entries 0 to {entries - 1}"
    return f"out of range for some query: {limits}"


def _tiles(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page_table: Int32[Array, "B P"],
    *,
    sinks: bool = False,
) -> Tiles:
    """Tiles with as many key/value heads a step as fit, then queries, then positions."""
    rows, heads = q.shape[1:3]
    _, kv_heads, page_size, width = kv_pages.shape
    itemsize = kv_pages.dtype.itemsize
    queries = rows * heads // kv_heads
    # Queries, results and sinks have two buffers each; a maximum, a total and a sink take a row of
    # lanes each.
    head_bytes = 2 * width * (itemsize + 4) + 2 * (1 + sinks) * LANES * 4
    head_counts = [h for h in range(1, kv_heads + 1) if kv_heads % h == 0]
    head_counts = [h for h in head_counts if h == 1 or h * head_bytes * queries <= _QUERY_BYTES]
    per_sequence = pl.cdiv(head_bytes * max(head_counts) * queries, _QUERY_BYTES)
    tile = pl.cdiv(queries, per_sequence)
    product_rows = min(tile, _PRODUCT_ROWS)
    max_positions = _SLOT_BYTES // (max(head_counts) * width * itemsize)
    capacity = page_table.shape[1] * page_size
    block = max(b for b in (128, 256, 512) if b == 128 or (b <= max_positions and b <= capacity))
    return Tiles(
        heads=max(head_counts),
        per_sequence=per_sequence,
        rows=pl.cdiv(tile, product_rows) * product_rows,
        product_rows=product_rows,
        block=block,
        copy=math.gcd(page_size, block),
        min_copy=32 // itemsize,
    )


def _check(q: jax.Array, kv_pages: jax.Array, page_table: jax.Array) -> None:
    reason = why_not(q.shape[-1], kv_pages)
    if reason is not None:
        raise ValueError(f"attention by Pallas on a TPU does not take {reason}")
    reason = why_no_table(*page_table.shape)
    if reason is not None:
        raise ValueError(reason)
