"""Verification on GPUs with clusters: the code around the kernels of `pallas_gpu_kernel.py`.

Logits are read once, truncated rows once more, and the rows that tokens are drawn from once more.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from ssd_jax.compat import kernels_are_interpreted
from ssd_jax.kernels.sparse import dense
from ssd_jax.kernels.verify.pallas_gpu_kernel import LANES, SLOTS, draw, measure
from ssd_jax.kernels.verify.row_kernels import (
    DrawInput,
    DrawRows,
    Measured,
    MeasureOptions,
    MeasureRows,
    RowInput,
    RowKernels,
    RowResult,
    measured_of,
    on_every_device,
    pack,
)

CAPABILITIES = ("9.0", "10.0", "10.3")
NEEDS = "9.0 (H100, H200), 10.0 or 10.3 (B200)"
"""Compute capability of GPUs whose blocks write to each other's shared memory."""
PARTS = 8
"""Most parts of a row: blocks of a cluster, of which every such GPU takes eight."""
_WIDTHS = 1024, 128  # columns of a tile; the narrow one where a cluster's would exceed a row
_SHARED = 200 << 10  # bytes of shared memory for a part of a row; the GPUs have 227 KiB
_BLOCKS = 264  # of the grid of `draw`, which a GPU runs at a time; a guess costs time only


def why_not(vocab: int, device: Any) -> str | None:
    """Why a JAX device cannot run the kernels for rows of `vocab` logits, in one line, or None."""
    capability = getattr(device, "compute_capability", "none")
    if capability not in CAPABILITIES:
        return f"a device of compute capability {capability}: it needs {NEEDS}"
    width, _, tiles = _split(vocab, PARTS)
    needed = 4 * tiles * width
    if needed > _SHARED:
        return f"rows of {vocab} tokens: it needs {needed >> 10} KiB of {_SHARED >> 10} for a part"
    return None


def _split(size: int, most: int) -> tuple[int, int, int]:
    """The columns of a tile, the parts of a row, at most so many, and the tiles of each."""
    wide, narrow = _WIDTHS
    width = wide if size >= PARTS * wide else narrow
    parts = min(most, pl.cdiv(size, width))
    return width, parts, pl.cdiv(pl.cdiv(size, width), parts)


def _kernel(body: Any, name: str, nbytes: int, **options: Any) -> Any:
    """The body as a call, of which XLA is told how many bytes it reads and writes."""
    call = plgpu.kernel(
        body,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=False
        ),
        **options,
    )

    def scoped(*operands: jax.Array) -> Any:
        # JAX does not tell XLA what such kernels cost.
        with jax.named_scope(f"bytes_accessed.{nbytes}"):
            return call(*operands)

    return on_every_device(scoped)


def _wide_enough(rows: Float32[Array, "n V"]) -> Float32[Array, "n W"]:
    """The rows, padded to a tile."""
    return jnp.pad(rows, ((0, 0), (0, max(0, _WIDTHS[-1] - rows.shape[1]))))


def _measure(rows: MeasureRows, options: MeasureOptions) -> Measured:
    scores = _wide_enough(rows.scores)
    count, size = scores.shape
    width, parts, tiles = _split(size, PARTS)
    interpret = kernels_are_interpreted()
    out = jax.ShapeDtypeStruct((count, len(RowResult())), jnp.float32)
    inbox = (SLOTS, parts, LANES)
    scratch: list[Any] = [plgpu.SMEM((tiles, width), jnp.float32)]
    outputs = [out]
    if interpret:
        outputs.append(jax.ShapeDtypeStruct((count, *inbox), jnp.float32))
        scratch.append(plgpu.ClusterBarrier(collective_axes=("part",)))
    else:
        scratch.insert(0, plgpu.SMEM(inbox, jnp.float32))
    call = _kernel(
        functools.partial(measure, options=options, width=width, interpret=interpret),
        "verify_measure",
        4 * count * (size * (1 + options.truncated) + len(RowInput()) + 1 + len(RowResult())),
        out_type=tuple(outputs),
        scratch_types=scratch,
        grid=(count,),
        grid_names=("row",),
        cluster=(parts,),
        cluster_names=("part",),
    )
    columns = pack(rows.columns(), len(RowInput()))
    return measured_of(call(scores, columns, rows.follower)[0])


def _draw(rows: DrawRows, tokens: int) -> Int32[Array, "n"]:
    scores, residual = _wide_enough(rows.scores), rows.residual
    draws, size = len(rows.numbers), scores.shape[1]
    width, parts, tiles = _split(size, max(1, _BLOCKS // draws))
    value = jax.ShapeDtypeStruct((draws, parts), jnp.float32)
    token = jax.ShapeDtypeStruct((draws, parts), jnp.int32)
    laws = 1 if residual is None else 2
    call = _kernel(
        functools.partial(draw, tokens=tokens, tiles=tiles, width=width),
        "verify_draw",
        4 * draws * (laws * (size + 2 * parts) + len(DrawInput()) + 3),
        out_type=(value, token) * laws,
        scratch_types=[],
        grid=(draws, parts),
        grid_names=("draw", "part"),
    )
    words = jnp.stack(rows.words(), axis=1)
    operands = [scores, rows.numbers, pack(rows.columns(), len(DrawInput())), words]
    if residual is not None:
        operands.append(dense(residual.support, residual.q, size))
    values, ids, *left = call(*operands)
    token_of_p = _best(values, ids)
    if residual is None:
        return token_of_p
    # If rounding left nothing of the residual, p and q are equal in float32: draw from p.
    is_left = residual.applies & (left[0].max(axis=1) > -jnp.inf)
    return jnp.where(is_left, _best(*left), token_of_p)


def _best(values: Float32[Array, "n parts"], ids: Int32[Array, "n parts"]) -> Int32[Array, "n"]:
    """The token of the largest value of all parts, the lowest one of equal values."""
    return jnp.take_along_axis(ids, jnp.argmax(values, axis=1)[:, None], axis=1)[:, 0]


KERNELS = RowKernels(_measure, _draw)
