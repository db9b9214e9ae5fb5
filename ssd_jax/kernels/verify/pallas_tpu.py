"""Verification on TPUs: the code around the Pallas kernels of `pallas_tpu_kernel.py`.

Logits are read once, and the rows that tokens are drawn from once more.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32

from ssd_jax.kernels.verify.pallas_tpu_kernel import LANES, ROWS, draw, measure
from ssd_jax.kernels.verify.row_kernels import (
    DrawRows,
    Measured,
    MeasureOptions,
    MeasureRows,
    RowKernels,
    measured_of,
    on_every_device,
    pack,
)

SUPPORT = 1024
"""Most ids of a q that a residual is drawn with in the kernel."""
_BUFFERS = 3  # blocks of rows in VMEM: two of logits, which are copied in turn, and one of weights
_SPARE = 2 << 20
_VMEM = {"TPU v4": 16 << 20}  # bytes, by kind of device
_OTHER_VMEM = 48 << 20


def why_not(vocab: int, device: Any) -> str | None:
    """Why a JAX device cannot hold the rows that a step of the kernels needs, in one line, or
    None."""
    kind = device.device_kind
    needed, capacity = _bytes(vocab, _BUFFERS), _VMEM.get(kind, _OTHER_VMEM)
    if needed <= capacity:
        return None
    return f"rows of {vocab} tokens take {needed >> 20} MiB of {capacity >> 20} on a {kind}"


def _lanes(columns: dict[int, jax.Array], dtype: Any = jnp.float32) -> jax.Array:
    """[rows, LANES], in whole steps, with numbers of each row in some lanes."""
    packed = pack(columns, max(columns) + 1, dtype)
    return jnp.pad(packed, ((0, -len(packed) % ROWS), (0, LANES - packed.shape[1])))


def _params(size: int, buffers: int) -> pltpu.CompilerParams:
    """Parameters for so many blocks of rows in VMEM."""
    return pltpu.CompilerParams(vmem_limit_bytes=_bytes(size, buffers))


def _bytes(size: int, buffers: int) -> int:
    return buffers * ROWS * (size + LANES) * 4 + _SPARE


def _measure(rows: MeasureRows, options: MeasureOptions) -> Measured:
    scores = rows.scores
    count, size = scores.shape
    block = pl.BlockSpec((ROWS, LANES), lambda step: (step, 0))
    steps = pl.cdiv(count, ROWS)
    call = pl.pallas_call(
        functools.partial(measure, options=options),
        grid=(steps,),
        in_specs=[pl.BlockSpec((ROWS, size), lambda step: (step, 0)), block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((steps * ROWS, LANES), jnp.float32),
        scratch_shapes=[pltpu.VMEM((ROWS, size), jnp.float32)] if options.truncated else [],
        compiler_params=_params(size, _BUFFERS if options.truncated else 2),
        cost_estimate=pl.CostEstimate(
            flops=count * size * (4 + 2 * options.sampled + 150 * options.truncated),
            transcendentals=count * size * options.sampled,
            bytes_accessed=4 * (count * size + 3 * steps * ROWS * LANES),
        ),
        name="verify_measure",
    )
    columns = _lanes(rows.columns()), _lanes({0: rows.follower}, jnp.int32)
    return measured_of(on_every_device(call)(scores, *columns)[:count])


def _draw(rows: DrawRows, tokens: int) -> Int32[Array, "n"]:
    scores, index, residual = rows.scores, rows.numbers, rows.residual
    draws, size = index.shape[0], scores.shape[1]
    steps = pl.cdiv(draws, ROWS)
    padding = steps * ROWS - draws
    block = pl.BlockSpec((ROWS, LANES), lambda step, *_: (step, 0))
    operands, specs = [], []
    scratch: list[Any] = [pltpu.VMEM((ROWS, size), jnp.float32), pltpu.SemaphoreType.DMA((1,))]
    if residual is not None:
        padded = ((0, padding), (0, 0))
        operands = [
            jnp.pad(residual.support, padded, constant_values=-1),
            jnp.pad(residual.q, padded),
        ]
        shape = (ROWS, residual.support.shape[1])
        spec = pl.BlockSpec(shape, lambda step, *_: (step, 0), memory_space=pltpu.SMEM)
        specs = [spec, spec]
        scratch.append(pltpu.VMEM((ROWS, size + -size % LANES), jnp.float32))
    call = pl.pallas_call(
        functools.partial(draw, tokens=tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(steps,),
            in_specs=[pl.BlockSpec(memory_space=pltpu.HBM), block, block, *specs],
            out_specs=block,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((steps * ROWS, LANES), jnp.int32),
        compiler_params=_params(size, 2),
        cost_estimate=pl.CostEstimate(
            flops=120 * steps * ROWS * size,
            transcendentals=4 * steps * ROWS * size,
            bytes_accessed=4 * steps * ROWS * (size + 3 * LANES),
        ),
        name="verify_draw",
    )

    def draw_rows(index: jax.Array, scores: jax.Array, *others: jax.Array) -> jax.Array:
        # XLA would copy all of the logits to VMEM.
        return call(index, pltpu.with_memory_space_constraint(scores, pltpu.HBM), *others)

    out = on_every_device(draw_rows)(
        jnp.pad(index, (0, padding)),
        scores,
        _lanes(rows.columns()),
        _lanes(dict(enumerate(rows.words())), jnp.int32),
        *operands,
    )
    return out[:draws, 0]


KERNELS = RowKernels(_measure, _draw, SUPPORT)
