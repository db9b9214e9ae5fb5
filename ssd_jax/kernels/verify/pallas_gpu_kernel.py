"""The Mosaic GPU kernels of `pallas_gpu.py`: what is to be known of each row, and draws from rows.

A row of logits has a cluster of blocks of the grid, each of which has a part of the row in shared
memory and goes over it as often as it needs. Blocks add up what they find by writing it to each
other's shared memory. Weights and thresholds are those of the kernels for TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ssd_jax.kernels.verify.kernel_noise import gumbel
from ssd_jax.kernels.verify.row_kernels import DrawInput, MeasureOptions, RowInput, RowResult

LANES = 128
"""Numbers that a block writes to another at a time: one for each of its threads."""
SLOTS = 6
"""Places for what the blocks of a cluster write to each other."""
_DIGIT_SLOTS = 2  # the first ones, for digits in turn; each other purpose has its own
_ROW_SLOT, _TOTAL_SLOT, _MASS_SLOT, _CUT_SLOT = range(_DIGIT_SLOTS, SLOTS)

_BITS, _DIGIT = 30, 3  # see `truncation.py`

Ref = Any
"""Ref of an array in one of a GPU's memories."""
Tile = Any
"""An array in registers, or a number."""
_PLGPU: Any = plgpu  # has some names only in newer versions of JAX
_load: Any = plgpu.load


def _layout(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def _full(value: float | int, size: int, dtype: Any = jnp.float32) -> Tile:
    return plgpu.layout_cast(jnp.full((size,), value, dtype), _layout(size))


def _ids(size: int) -> Tile:
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=_layout(size))


def _tile(ref: Ref, size: int) -> Tile:
    return _load(ref, layout=_layout(size), optimized=False)


class Columns(NamedTuple):
    """The columns of a row that a block of the grid goes over: some tiles of `width` columns.

    Attributes:
      size: of the row.
      tiles: most tiles of a part.
    """

    size: int
    width: int
    tiles: int
    part: Tile

    @property
    def occupied(self) -> Tile:
        """Number of tiles that this part has."""
        return jnp.clip(pl.cdiv(self.size, self.width) - self.part * self.tiles, 0, self.tiles)

    def tile(self, row: Ref, number: Tile) -> tuple[Tile, Tile, Tile]:
        """Logits of a tile, their ids, and which of them are its own: the last tile of a row also
        has columns of the one before it."""
        first = (self.part * self.tiles + number) * self.width
        start = jnp.minimum(first, self.size - self.width)
        ids = _ids(self.width) + start
        return _tile(row.at[pl.ds(start, self.width)], self.width), ids, ids >= first


def _best_of(values: Sequence[tuple[Tile, Tile]]) -> tuple[Tile, Tile]:
    """The largest of values and its lowest id, from pairs of both."""
    top = functools.reduce(jnp.maximum, [value for value, _ in values])
    ids = [jnp.where(value == top, index, jnp.inf) for value, index in values]
    return top, functools.reduce(jnp.minimum, ids)


def _best_of_tile(best: Tile, ids: Tile) -> tuple[Tile, Tile]:
    """The largest number of a tile and the lowest of its ids."""
    top = jnp.max(best)
    return top, jnp.min(jnp.where(best == top, ids, jnp.iinfo(jnp.int32).max))


class Cluster(NamedTuple):
    """The blocks of the grid that have the parts of a row.

    Attributes:
      inbox: [SLOTS, parts, LANES] in shared memory, to which the others write; or, interpreted,
        [rows, SLOTS, parts, LANES] in the memory that all blocks have.
      barrier: given if the kernel is interpreted.
    """

    inbox: Ref
    parts: int
    row: Tile
    part: Tile
    barrier: Ref | None

    def _gather(self, slot: Tile, numbers: Sequence[Tile]) -> Ref:
        """Numbers of every block, [parts, LANES]. The slot must not be the one before: another
        block may still read that."""
        lanes, tile = _ids(LANES), _full(0, LANES)
        for lane, number in enumerate(numbers):
            tile = jnp.where(lanes == lane, number, tile)
        if self.barrier is not None:
            self.inbox[self.row, slot, self.part] = tile
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
            return self.inbox.at[self.row, slot]
        for part in range(self.parts):
            box = _PLGPU.cluster_ref(self.inbox.at[slot, self.part], {"part": part})
            box[...] = tile
        _synchronise()
        return self.inbox.at[slot]

    def numbers(self, slot: Tile, numbers: Sequence[Tile]) -> list[list[Tile]]:
        """Some numbers of every block."""
        lines = self._gather(slot, numbers)
        return [[lines[part, lane] for part in range(self.parts)] for lane in range(len(numbers))]

    def sum(self, slot: Tile, number: Tile) -> Tile:
        """The sum of a number of every block, in the order of the parts."""
        return functools.reduce(jnp.add, self.numbers(slot, [number])[0])

    def count_reached(self, slot: Tile, numbers: Sequence[Tile], least: Tile) -> Tile:
        """How many of some numbers, each summed over all blocks, are at least `least`."""
        lines = self._gather(slot, numbers)
        sums = functools.reduce(
            jnp.add, [_tile(lines.at[part], LANES) for part in range(self.parts)]
        )
        return jnp.sum(jnp.where((_ids(LANES) < len(numbers)) & (sums >= least), 1, 0))


@_PLGPU.inline_mgpu()
def _synchronise(context: Any) -> None:
    """Waits for all blocks of the cluster, and for what they have written."""
    del context
    from jax.experimental.mosaic import gpu

    utils: Any = gpu.utils
    for step in ("arrive.release", "wait.acquire"):
        utils.inline_ptx(f"barrier.cluster.{step}.aligned;", has_side_effects=True, convergent=True)


def measure(
    logits: Ref,
    rows: Ref,
    followers: Ref,
    out: Ref,
    *scratch: Ref,
    options: MeasureOptions,
    width: int,
    interpret: bool,
) -> None:
    """What is to be known of a row: a block of the grid is (row, part); parts are a cluster.

    Args:
      logits: [n, V] float32, V at least `width`.
      rows: [n, 4] float32, see `RowInput`.
      followers: [n] int32: the token whose logit is returned.
      out: [n, 6] float32, see `RowResult`.
      scratch: the cluster's inbox (interpreted, an output), [tiles, width] float32 in shared memory
        for a part of the row, and, interpreted, the cluster's barrier.
      width: columns of a tile.
      interpret: whether JAX interprets the kernel, which has neither others' shared memory nor PTX.
    """
    inbox, weights, *barriers = scratch
    row, part = lax.axis_index("row"), lax.axis_index("part")
    parts = inbox.shape[-2]
    columns = Columns(logits.shape[1], width, weights.shape[0], part)
    cluster = Cluster(inbox, parts, row, part, barriers[0] if interpret else None)
    follower, setting = followers[row], RowInput()

    def tile(index: Tile) -> tuple[Tile, Tile, Tile]:
        x, ids, is_own = columns.tile(logits.at[row], index)
        return x, ids, is_own & (ids < options.tokens)

    def look(index: Tile, carry: tuple[Tile, ...]) -> tuple[Tile, ...]:
        best, best_ids, faults, chosen = carry
        x, ids, exists = tile(index)
        faults += jnp.where(exists & ((x != x) | (x == jnp.inf)), 1.0, 0.0)
        chosen = jnp.where(exists & (ids == follower), x, chosen)
        x = jnp.where(exists & (x == x), x, -jnp.inf)
        if options.sampled:
            weights[index] = x
        is_better = x > best
        return jnp.maximum(best, x), jnp.where(is_better, ids, best_ids), faults, chosen

    nothing = _full(-jnp.inf, width)
    begin = nothing, _full(0, width, jnp.int32), _full(0, width), nothing
    best, best_ids, faults, chosen = lax.fori_loop(0, columns.occupied, look, begin)
    top, best_id = _best_of_tile(best, best_ids)
    numbers = [top, best_id.astype(jnp.float32), jnp.sum(faults), jnp.max(chosen)]
    tops, best_ids, faults, chosen = cluster.numbers(_ROW_SLOT, numbers)
    top, best_id = _best_of(list(zip(tops, best_ids, strict=True)))
    is_sound = (functools.reduce(jnp.add, faults) == 0) & (top > -jnp.inf)
    place = RowResult()
    results = {
        place.top: top,
        place.chosen: functools.reduce(jnp.maximum, chosen),
        place.best: best_id,
        place.sound: jnp.where(is_sound, 1.0, 0.0),
    }
    if options.sampled:
        temperature = rows[row, setting.temperature]

        def weigh(index: Tile, total: Tile) -> Tile:
            w = jnp.exp((_tile(weights.at[index], width) - top) / temperature)
            weights[index] = w
            return total + w

        total = jnp.sum(lax.fori_loop(0, columns.occupied, weigh, _full(0, width)))
        total = cluster.sum(_TOTAL_SLOT, total)
        floor = jnp.float32(-jnp.inf)
        if options.truncated:
            top_k, top_p, min_p = (
                rows[row, lane] for lane in (setting.top_k, setting.top_p, setting.min_p)
            )
            part_of_row = PartOfRow(weights, columns.occupied, cluster)

            def keep() -> tuple[Tile, Tile]:
                low = part_of_row.low(top_k, top_p, min_p, total)

                def add(index: Tile, carry: tuple[Tile, Tile]) -> tuple[Tile, Tile]:
                    total, floor = carry
                    w, (x, _, exists) = _tile(weights.at[index], width), tile(index)
                    stays = exists & (w >= low)
                    floor = jnp.minimum(floor, jnp.where(stays, x, jnp.inf))
                    return total + jnp.where(stays, w, 0.0), floor

                begin = _full(0, width), _full(jnp.inf, width)
                sums, floors = lax.fori_loop(0, columns.occupied, add, begin)
                numbers = [jnp.sum(sums), jnp.min(floors)]
                totals, floors = cluster.numbers(_CUT_SLOT, numbers)
                return functools.reduce(jnp.add, totals), functools.reduce(jnp.minimum, floors)

            applies = (top_k > 0) | (top_p < 1) | (min_p > 0)
            total, floor = lax.cond(applies, keep, lambda: (total, floor))
        results |= {place.total: total, place.floor: floor}

    @pl.when(part == 0)
    def _() -> None:
        for lane, result in results.items():
            out[row, lane] = result


class PartOfRow(NamedTuple):
    """The weights of a part of a row, in shared memory: [tiles, width], of which `tiles` are there.
    The largest weight of the row is 1."""

    weights: Ref
    tiles: Tile
    cluster: Cluster

    def low(self, top_k: Tile, top_p: Tile, min_p: Tile, total: Tile) -> Tile:
        """The least weight that stays; see `truncation.cut`."""

        def with_top_k() -> tuple[Tile, Tile]:
            low = self._search(top_k, lambda w: jnp.where(w > 0, 1.0, 0.0))
            mass = self._sums([low], lambda w: w)[0]
            return low, self.cluster.sum(_MASS_SLOT, mass)

        def without() -> tuple[Tile, Tile]:
            return jnp.float32(0), total

        low, mass = lax.cond(top_k > 0, with_top_k, without)
        low_p = lax.cond(
            top_p < 1, lambda: self._search(top_p * mass, lambda w: w), lambda: jnp.float32(0)
        )
        return jnp.minimum(jnp.maximum(jnp.maximum(low, low_p), min_p), 1.0)

    def _search(self, least: Tile, worth: Callable[[Tile], Tile]) -> Tile:
        """The largest threshold at or above which the weights' worth is at least `least`."""

        def digit(index: Tile, bits: Tile) -> Tile:
            shift = _BITS - _DIGIT * (index + 1)
            lows = [
                lax.bitcast_convert_type(bits | lax.shift_left(jnp.int32(d), shift), jnp.float32)
                for d in range(1, 2**_DIGIT)
            ]
            sums = self._sums(lows, worth)
            reached = self.cluster.count_reached(lax.rem(index, _DIGIT_SLOTS), sums, least)
            return bits | lax.shift_left(reached, shift)

        bits = lax.fori_loop(0, _BITS // _DIGIT, digit, jnp.int32(0))
        return lax.bitcast_convert_type(bits, jnp.float32)

    def _sums(self, lows: Sequence[Tile], worth: Callable[[Tile], Tile]) -> list[Tile]:
        """What the weights of the part at or above each threshold are worth."""
        width = self.weights.shape[1]

        def add(index: Tile, sums: tuple[Tile, ...]) -> tuple[Tile, ...]:
            w = _tile(self.weights.at[index], width)
            worths = worth(w)
            return tuple(
                total + jnp.where(w >= low, worths, 0.0)
                for total, low in zip(sums, lows, strict=True)
            )

        begin = (_full(0, width),) * len(lows)
        return [jnp.sum(total) for total in lax.fori_loop(0, self.tiles, add, begin)]


def draw(
    logits: Ref,
    index: Ref,
    rows: Ref,
    keys: Ref,
    *refs: Ref,
    tokens: int,
    tiles: int,
    width: int,
) -> None:
    """The best token of a part of a row by the noise of its key; a block of the grid is (draw,
    part).

    Args:
      logits: [n, V] float32, V at least `width`.
      index: [draws] int32: the row of each draw.
      rows: [draws, 6] float32, see `DrawInput`.
      keys: [draws, 2] int32.
      refs: q [draws, V] float32 of the residual, if there is one; the results, [draws, parts]
        float32 and int32: the sum of noise and log p, and the token; another two for the residual.
      tokens: number of ids that exist.
      tiles, width: of a part.
    """
    number, part = lax.axis_index("draw"), lax.axis_index("part")
    has_residual = len(refs) == 5
    columns = Columns(logits.shape[1], width, tiles, part)
    place = DrawInput()
    temperature, top, total, floor = (
        rows[number, lane] for lane in (place.temperature, place.top, place.total, place.floor)
    )
    scale = rows[number, place.scale]
    key = keys[number, 0], keys[number, 1]
    row = logits.at[index[number]]

    def step(index: Tile, carry: tuple[Tile, ...]) -> tuple[Tile, ...]:
        x, ids, is_own = columns.tile(row, index)
        stays = is_own & (ids < tokens) & (x >= floor)
        p = jnp.where(stays, jnp.exp((x - top) / temperature) / total, 0.0)

        def compare(*carry: Tile) -> tuple[Tile, ...]:
            noise = gumbel(key, ids, _log1p)
            best_by_p = _better(carry[0], carry[1], jnp.log(p) + noise, ids)
            if not has_residual:
                return best_by_p
            q, _, _ = columns.tile(refs[0].at[number], index)
            left = jnp.where(stays, jnp.maximum(scale * p - q, 0.0), 0.0)
            return best_by_p + _better(carry[2], carry[3], jnp.log(left) + noise, ids)

        # Where filters leave nothing, there is no need of noise.
        is_any = jnp.max(jnp.where(p > 0, 1.0, 0.0)) > 0
        return lax.cond(is_any, compare, lambda *carry: carry, *carry)

    begin = _full(-jnp.inf, width), _full(0, width, jnp.int32)
    best_tiles = lax.fori_loop(0, columns.occupied, step, begin * (1 + has_residual))
    results = refs[1:] if has_residual else refs
    for best, ids, value, token in zip(
        best_tiles[::2], best_tiles[1::2], results[::2], results[1::2], strict=True
    ):
        value[number, part], token[number, part] = _best_of_tile(best, ids)


def _better(best: Tile, best_ids: Tile, values: Tile, ids: Tile) -> tuple[Tile, Tile]:
    """The larger of two tiles' numbers, and its ids; of equal ones the first."""
    return jnp.maximum(best, values), jnp.where(values > best, ids, best_ids)


def _log1p(x: Tile) -> Tile:
    """`log1p`, which such kernels lack: the error of 1 + x is divided out again."""
    y = 1 + x
    return jnp.where(y == 1, x, jnp.log(y) * (x / jnp.where(y == 1, 1.0, y - 1)))
