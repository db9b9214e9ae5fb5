"""Writing keys and values to pages on TPUs, in place.

Next to a Pallas kernel that reads the pages, an XLA scatter copies all of them into another layout
and back.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int32, Shaped

from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import PageTable, as_array

_WINDOWS_BYTES = 8 << 20
_TOKENS = 128


def write_tpu(
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page_table: PageTable,
    positions: Int32[Array, "B R"],
    values: Float[Array, "B R kv_heads lanes"],
    *,
    shards: HeadShards | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Shaped[Array, "pages kv_heads page_size lanes"]:
    """Writes the key and value of each token; in place when the caller donates the pages.

    A window of 16 positions (8 in float32) is read, changed and written back, once for all tokens
    that fall into it and follow each other within some 128.

    Args:
      kv_pages: see `tree_attention_pallas_tpu`.
      page_table: rows that write have no page in common.
      shards: given if several devices share the heads.
      positions: absolute, in any order; a token outside [0, P * page_size), or on a page that does
        not exist, is not written. Of two tokens at the same position, the later one is written.
    """
    page, offset = _page_and_offset(kv_pages, page_table, positions)
    write_heads = functools.partial(_write_heads, interpret=interpret)
    if shards is not None:
        write_heads = shards.map(write_heads, (1, None, None, 2), result=1)
    return write_heads(kv_pages, page, offset, values)


def _write_heads(
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page: Int32[Array, "B R"],
    offset: Int32[Array, "B R"],
    values: Float[Array, "B R kv_heads lanes"],
    *,
    interpret: bool | pltpu.InterpretParams,
) -> Shaped[Array, "pages kv_heads page_size lanes"]:
    """Calls the kernel for the heads of one device."""
    batch, rows, heads, lanes = values.shape
    itemsize = kv_pages.dtype.itemsize
    tile = 32 // itemsize
    windows_that_fit = _WINDOWS_BYTES // (heads * tile * lanes * itemsize) // 8 * 8
    tokens = min(max(windows_that_fit, 8), _TOKENS, pl.cdiv(batch * rows, 8) * 8)
    padding = -(batch * rows) % tokens
    # In float32, rows can be addressed one by one.
    new = values.astype(kv_pages.dtype).astype(jnp.float32).reshape(-1, heads, lanes)
    new = jnp.pad(new.swapaxes(0, 1), ((0, 0), (0, padding), (0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, rows=rows),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((batch * rows + padding) // tokens,),
            in_specs=[
                pl.BlockSpec((heads, tokens, lanes), lambda step, *_: (0, step, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((tokens, heads, tile, lanes), kv_pages.dtype),
                *[pltpu.SMEM((tokens,), jnp.int32)] * 3,
                *[pltpu.SemaphoreType.DMA] * 2,
            ],
        ),
        # Declared for the result, HBM holds for the operand, too. XLA ignores it if it is declared
        # for blocks only, and copies pages that fit the chip there and back.
        out_shape=pltpu.HBM(kv_pages.shape, kv_pages.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        # One window a token, read and written; tokens that share a window cost less.
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=values.size * (values.dtype.itemsize + 2 * tile * itemsize),
            transcendentals=0,
        ),
        input_output_aliases={3: 0},  # scalars count
        interpret=interpret,
        name="kv_write",
    )(
        jnp.pad(page.reshape(-1), (0, padding), constant_values=-1),
        jnp.pad(offset.reshape(-1), (0, padding)),
        new,
        kv_pages,
    )


def _page_and_offset(
    kv_pages: Shaped[Array, "pages kv_heads page_size lanes"],
    page_table: PageTable,
    positions: Int32[Array, "B R"],
) -> tuple[Int32[Array, "B R"], Int32[Array, "B R"]]:
    """Each token's page, or -1, and offset within the page."""
    page_table = as_array(page_table, len(positions))
    pages, _, page_size, _ = kv_pages.shape
    inside = (positions >= 0) & (positions < page_table.shape[1] * page_size)
    safe = jnp.where(inside, positions, 0)
    page = jnp.take_along_axis(page_table, safe // page_size, axis=1)
    return jnp.where(inside & (page >= 0) & (page < pages), page, -1), safe % page_size


def _kernel(
    page: Any,
    offset: Any,
    new: Any,
    _: Any,
    pages: Any,
    windows: Any,
    window_page: Any,
    window_offset: Any,
    token_window: Any,
    read_semaphore: Any,
    write_semaphore: Any,
    *,
    rows: int,
) -> None:
    """Writes the tokens of one step of the grid.

    Args:
      page, offset: [tokens of all steps] int32, where each token goes; page -1 is nowhere.
      new: [heads, tokens, lanes] float32.
      windows: [tokens, heads, tile, lanes], the windows that are changed.
      window_page, window_offset: [tokens], place of each window.
      token_window: [tokens], the window that a token changes, or -1.
      rows: tokens of a sequence.
    """
    tokens, tile = new.shape[1], windows.shape[2]
    start = pl.program_id(0) * tokens

    def window_ref(window: Any) -> Any:
        target_offset = pl.ds(pl.multiple_of(window_offset[window], tile), tile)
        return pages.at[window_page[window], :, target_offset]

    def read_copy(window: Any) -> Any:
        return pltpu.make_async_copy(window_ref(window), windows.at[window], read_semaphore)

    def write_copy(window: Any) -> Any:
        return pltpu.make_async_copy(windows.at[window], window_ref(window), write_semaphore)

    def find_window(
        token: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        count, first_window = carry  # windows so far, and the first of this sequence
        # Sequences have no page in common, so only windows of the same one are compared.
        first_window = jnp.where(lax.rem(start + token, rows) == 0, count, first_window)
        target_page = page[start + token]
        target_offset = lax.div(offset[start + token], tile) * tile

        def compare(window: jax.Array, match: jax.Array) -> jax.Array:
            matches = (window_page[window] == target_page) & (
                window_offset[window] == target_offset
            )
            return jnp.where(matches, window, match)

        window = lax.fori_loop(first_window, count, compare, count)
        token_window[token] = jnp.where(target_page < 0, -1, window)
        is_new = (target_page >= 0) & (window == count)

        @pl.when(is_new)
        def _():
            window_page[count] = target_page
            window_offset[count] = target_offset
            read_copy(count).start()

        return count + is_new.astype(jnp.int32), first_window

    def update_window(token: jax.Array, _: None) -> None:
        window = token_window[token]

        @pl.when(window >= 0)
        def _():
            position = lax.broadcasted_iota(jnp.int32, windows.shape[1:], 1)
            is_token = position == lax.rem(offset[start + token], tile)
            row = new[:, pl.ds(token, 1)].astype(windows.dtype)
            windows[window] = jnp.where(is_token, row, windows[window])

    # All reads are in flight while windows are still being looked for, and all writes at once, so
    # that their latencies overlap. A window is written once, after all of its tokens.
    zero = jnp.int32(0)
    count, _ = lax.fori_loop(0, tokens, find_window, (zero, zero))
    lax.fori_loop(0, count, lambda window, _: read_copy(window).wait(), None)
    lax.fori_loop(0, tokens, update_window, None)
    lax.fori_loop(0, count, lambda window, _: write_copy(window).start(), None)
    lax.fori_loop(0, count, lambda window, _: write_copy(window).wait(), None)
