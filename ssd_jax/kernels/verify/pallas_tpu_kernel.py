"""The Pallas kernels of `pallas_tpu.py`: what is to be known of each row, and draws from rows.

A step of the grid has eight rows of logits in VMEM, whole, and goes over them as often as it needs.
Weights are exp((logit - top) / temperature): thresholds are searched among them, so that nothing is
divided, and the tokens that filters leave are given by the least of their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ssd_jax.kernels.verify.kernel_noise import gumbel
from ssd_jax.kernels.verify.row_kernels import DrawInput, MeasureOptions, RowInput, RowResult

ROWS = 8
"""Rows of a step."""
LANES = 128
"""Numbers that are passed for a row, or returned; see `RowInput`, `RowResult` and `DrawInput`."""

_WIDTH = 2048  # columns that a loop takes at a time
_BITS, _DIGIT = 30, 3  # see `truncation.py`

Ref = Any
T = TypeVar("T")


def _over_columns(
    size: int, step: Callable[[jax.Array | int, int, T], T], carry: T, width: int = _WIDTH
) -> T:
    """`step(first, width, carry)` for columns [first, first + width), from left to right."""
    steps = size // width

    def aligned(index: jax.Array, carry: T) -> T:
        return step(pl.multiple_of(index * width, width), width, carry)

    carry = lax.fori_loop(0, steps, aligned, carry)
    return step(steps * width, size % width, carry) if size % width else carry


def _columns(first: jax.Array | int, width: int) -> jax.Array:
    return first + lax.broadcasted_iota(jnp.int32, (ROWS, width), 1)


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)


def _any(flags: jax.Array) -> jax.Array:
    return jnp.max(jnp.where(flags, 1.0, 0.0)) > 0


def _lane(array: jax.Array, lane: int) -> jax.Array:
    return array[:, lane : lane + 1]


def _larger(
    best: jax.Array, index: jax.Array, values: jax.Array, columns: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
    """The best value of a row so far and its lowest column, given further columns."""
    most = jnp.max(values, axis=1, keepdims=True)
    column = jnp.min(jnp.where(values == most, columns, size), axis=1, keepdims=True)
    return jnp.maximum(best, most), jnp.where(most > best, column, index)


def measure(
    logits: Ref, rows: Ref, tokens: Ref, out: Ref, *scratch: Ref, options: MeasureOptions
) -> None:
    """What is to be known of eight rows.

    Args:
      logits: [8, V] float32.
      rows: [8, 128] float32, see `RowInput`.
      tokens: [8, 128] int32; the first lane is the token whose logit is returned.
      out: [8, 128] float32, see `RowResult`.
      scratch: [8, V] float32, for weights, if rows may be truncated.
    """
    size = logits.shape[1]
    settings, token = rows[...], tokens[:, 0:1]

    def values(first: jax.Array | int, width: int) -> tuple[jax.Array, jax.Array]:
        columns = _columns(first, width)
        exists = columns < options.tokens
        return jnp.where(exists, logits[:, pl.ds(first, width)], -jnp.inf), columns

    def look(first, width, carry):
        top, best, faults, chosen = carry
        x, columns = values(first, width)
        is_fault = jnp.where((x != x) | (x == jnp.inf), 1.0, 0.0)
        top, best = _larger(top, best, jnp.where(x != x, -jnp.inf, x), columns, size)
        chosen += _sum(jnp.where(columns == token, x, 0.0))
        return top, best, faults + _sum(is_fault), chosen

    one = (ROWS, 1)
    begin = jnp.full(one, -jnp.inf), jnp.zeros(one, jnp.int32), jnp.zeros(one), jnp.zeros(one)
    top, best, faults, chosen = _over_columns(size, look, begin)
    sound = (faults == 0) & (top > -jnp.inf)
    results = {
        RowResult().top: top,
        RowResult().chosen: chosen,
        RowResult().best: best.astype(jnp.float32),
        RowResult().sound: jnp.where(sound, 1.0, 0.0),
    }
    if options.sampled:
        temperature = _lane(settings, RowInput().temperature)

        def weigh(first, width, total):
            x, _ = values(first, width)
            weights = jnp.exp((x - top) / temperature)
            if options.truncated:
                scratch[0][:, pl.ds(first, width)] = weights
            return total + _sum(weights)

        total, floor = _over_columns(size, weigh, jnp.zeros(one)), jnp.full(one, -jnp.inf)
        if options.truncated:
            low = _low(scratch[0], settings, total)

            def keep(first, width, carry):
                total, floor = carry
                x, _ = values(first, width)
                weights = scratch[0][:, pl.ds(first, width)]
                stays = weights >= low
                least = jnp.min(jnp.where(stays, x, jnp.inf), axis=1, keepdims=True)
                return total + _sum(jnp.where(stays, weights, 0.0)), jnp.minimum(floor, least)

            total, floor = _over_columns(size, keep, (jnp.zeros(one), jnp.full(one, jnp.inf)))
        results |= {RowResult().total: total, RowResult().floor: floor}
    lane = lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 1)
    packed = jnp.zeros((ROWS, LANES))
    for place, result in results.items():
        packed = jnp.where(lane == place, result, packed)
    out[...] = packed


def _low(weights: Ref, settings: jax.Array, total: jax.Array) -> jax.Array:
    """The least weight that stays; see `truncation.cut`. The largest weight is 1."""
    top_k, top_p = _lane(settings, RowInput().top_k), _lane(settings, RowInput().top_p)
    size = weights.shape[1]

    def search(least: jax.Array, worth: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def digit(index: jax.Array, bits: jax.Array) -> jax.Array:
            shift = _BITS - _DIGIT * (index + 1)
            lows = [
                lax.bitcast_convert_type(bits | lax.shift_left(jnp.int32(d), shift), jnp.float32)
                for d in range(1, 2**_DIGIT)
            ]

            def add(first, width, sums):
                w = weights[:, pl.ds(first, width)]
                worths = worth(w)
                return tuple(
                    total + _sum(jnp.where(w >= low, worths, 0.0))
                    for total, low in zip(sums, lows, strict=True)
                )

            sums = _over_columns(size, add, (jnp.zeros((ROWS, 1)),) * len(lows))
            flags = (jnp.where(total >= least, 1, 0) for total in sums)
            reached = sum(flags, start=jnp.zeros((ROWS, 1), jnp.int32))
            return bits | lax.shift_left(reached, jnp.broadcast_to(shift, reached.shape))

        bits = lax.fori_loop(0, _BITS // _DIGIT, digit, jnp.zeros((ROWS, 1), jnp.int32))
        return lax.bitcast_convert_type(bits, jnp.float32)

    def where_any(applies: jax.Array, find: Callable[[], jax.Array]) -> jax.Array:
        nothing = jnp.zeros((ROWS, 1))
        low = lax.cond(_any(applies), find, lambda: nothing)
        return jnp.where(applies, low, 0.0)

    low = where_any(top_k > 0, lambda: search(top_k, lambda w: jnp.where(w > 0, 1.0, 0.0)))

    def add(first, width, mass):
        w = weights[:, pl.ds(first, width)]
        return mass + _sum(jnp.where(w >= low, w, 0.0))

    mass = jnp.where(top_k > 0, _over_columns(size, add, jnp.zeros((ROWS, 1))), total)
    low_p = where_any(top_p < 1, lambda: search(top_p * mass, lambda w: w))
    low = jnp.maximum(low, low_p)
    return jnp.minimum(jnp.maximum(low, _lane(settings, RowInput().min_p)), 1.0)


def draw(index: Ref, logits: Ref, rows: Ref, keys: Ref, *refs: Ref, tokens: int) -> None:
    """Tokens drawn from eight rows by the noise of their keys.

    Args:
      index: [draws] int32 in scalar memory: the row of each draw.
      logits: [n, V] float32 in HBM.
      rows: [8, 128] float32, see `DrawInput`.
      keys: [8, 128] int32; the first two lanes are the words of a key.
      refs: ids [8, N] and q [8, N] of the residual in scalar memory, if there is one; the result
        [8, 128] int32, in its first lane; [8, V] float32 for rows of logits; the semaphore of
        copies; [8, V rounded up] for q, if there is a residual.
      tokens: number of ids that exist.
    """
    sparse = refs[: 2 * (len(refs) > 3)]
    out, x_rows, semaphore, *q_rows = refs[len(sparse) :]
    size = logits.shape[1]
    first_row = pl.program_id(0) * ROWS

    def copy(place: int) -> Any:
        row = index[first_row + place]
        source, target = logits.at[pl.ds(row, 1)], x_rows.at[pl.ds(place, 1)]
        return pltpu.make_async_copy(source, target, semaphore.at[0])

    for place in range(ROWS):
        copy(place).start()
    if q_rows:
        _spread(*sparse, *q_rows)
    for place in range(ROWS):
        copy(place).wait()
    row = rows[...]
    temperature, top = _lane(row, DrawInput().temperature), _lane(row, DrawInput().top)
    total, floor = _lane(row, DrawInput().total), _lane(row, DrawInput().floor)
    applies, scale = _lane(row, DrawInput().applies) > 0, _lane(row, DrawInput().scale)
    key = keys[:, 0:1], keys[:, 1:2]

    def step(first, width, carry):
        columns = _columns(first, width)
        x = jnp.where(columns < tokens, x_rows[:, pl.ds(first, width)], -jnp.inf)
        p = jnp.where(x >= floor, jnp.exp((x - top) / temperature) / total, 0.0)

        def compare(carry):
            noise = gumbel(key, columns)
            best = _larger(carry[0], carry[1], jnp.log(p) + noise, columns, size)
            if not q_rows:
                return best
            left = jnp.maximum(scale * p - q_rows[0][:, pl.ds(first, width)], 0.0)
            return best + _larger(carry[2], carry[3], jnp.log(left) + noise, columns, size)

        # Where filters leave nothing, there is no need of noise.
        return lax.cond(_any(p > 0), compare, lambda carry: carry, carry)

    begin = jnp.full((ROWS, 1), -jnp.inf), jnp.zeros((ROWS, 1), jnp.int32)
    best = _over_columns(size, step, begin * (2 if q_rows else 1))
    token = best[1]
    if q_rows:
        # If rounding left nothing of the residual, p and q are equal in float32: draw from p.
        token = jnp.where(applies & (best[2] > -jnp.inf), best[3], token)
    out[...] = jnp.broadcast_to(token, (ROWS, LANES))


def _spread(ids: Ref, q: Ref, rows: Ref) -> None:
    """Writes q [8, N] of ids, which are negative where there are none, to rows [8, V]."""

    def clear(first, width, carry):
        rows[:, pl.ds(first, width)] = jnp.zeros((ROWS, width))
        return carry

    _over_columns(rows.shape[1], clear, 0)
    shape = (ROWS, LANES)
    line = lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    count = ids.shape[1]

    def add(flat: jax.Array, carry: int) -> int:
        place, entry = lax.div(flat, count), lax.rem(flat, count)
        token = ids[place, entry]

        @pl.when(token >= 0)
        def _():
            first = pl.multiple_of(lax.div(token, LANES) * LANES, LANES)
            before = rows[:, pl.ds(first, LANES)]
            is_token = (line == place) & (lane == token - first)
            rows[:, pl.ds(first, LANES)] = jnp.where(is_token, before + q[place, entry], before)

        return carry

    lax.fori_loop(0, ROWS * count, add, 0)
