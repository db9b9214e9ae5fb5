"""Verification on TPUs: the code around the Pallas kernels of `pallas_tpu_kernel.py`.

Logits are read once, and the rows that tokens are drawn from once more. No distribution is written
to memory, unless a rule asks for one (`TargetProbs.probs_at`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels import soundness
from ssd_jax.kernels.distribution import DrawSettings, temperature_of
from ssd_jax.kernels.noise import Key
from ssd_jax.kernels.verify.pallas_tpu_kernel import (
    LANES,
    ROWS,
    Drawn,
    MeasureOptions,
    RowInput,
    RowResult,
    draw,
    measure,
)
from ssd_jax.kernels.verify.positions import (
    Judges,
    Law,
    Outcome,
    Positions,
    Residual,
    SamplingParts,
    TargetProbs,
)
from ssd_jax.kernels.verify.xla import draw_from, select

SUPPORT = 1024
"""Most ids of a q that a residual is drawn with in the kernel."""
_BUFFERS = 3  # blocks of rows in VMEM: two of logits, which are copied in turn, and one of weights
_SPARE = 2 << 20
_VMEM = {"TPU v4": 16 << 20}  # bytes, by kind of device
_OTHER_VMEM = 48 << 20


def why_not(vocab: int, device_kind: str) -> str | None:
    """Why a device cannot hold the rows that a step of the kernels needs, in one line, or None."""
    needed, there = _bytes(vocab, _BUFFERS), _VMEM.get(device_kind, _OTHER_VMEM)
    if needed <= there:
        return None
    return f"rows of {vocab} tokens take {needed >> 20} MiB of {there >> 20} on a {device_kind}"


class Measured(NamedTuple):
    """What is known of every position; p of a token is 0 below the floor.

    Attributes:
      chosen: logit of the token that follows in the chain.
    """

    top: Float32[Array, "n"]
    total: Float32[Array, "n"]
    floor: Float32[Array, "n"]
    chosen: Float32[Array, "n"]
    best: Int32[Array, "n"]
    sound: Bool[Array, "n"]

    def probs(
        self, allowed: Float32[Array, "n w"], settings: DrawSettings
    ) -> Float32[Array, "n w"]:
        """p of some tokens of every position, by their logits."""
        exponent = (allowed - self.top[:, None]) / temperature_of(settings)[:, None]
        weights = jnp.where(allowed >= self.floor[:, None], jnp.exp(exponent), 0.0)
        return weights / self.total[:, None]


def verify_pallas_tpu(
    positions: Positions,
    law: Law,
    judges: Judges,
    parts: SamplingParts,
    tokens: int,
) -> tuple[Outcome, Bool[Array, "n"]]:
    """The outcome, and the soundness of all positions; see `api.verify`."""
    scores = _scores(positions, law, parts)
    settings = law.settings(positions)
    measured = _measure(scores, positions.follower, settings, parts, tokens)
    sound = measured.sound
    if parts.adjusted is not False:  # bans may hide what is wrong with logits
        sound &= soundness.sound(positions.logits, tokens)
    greedy = judges.greedy(measured.best)
    if not parts.sampled:
        return greedy, sound

    def of(block: Positions) -> Measured:
        return jax.tree.map(lambda array: array[block.number], measured)

    def probs_at(block: Positions) -> jax.Array:
        return of(block).probs(law.allowed(block), law.settings(block))

    def prob_of() -> jax.Array:
        return measured.probs(measured.chosen[:, None], settings)[:, 0]

    def draw_block(block: Positions, key: Key, residual: Residual | None) -> jax.Array:
        if residual is not None and residual.support.shape[1] > SUPPORT:
            return draw_from(probs_at, uses_cond=False)(block, key, residual)
        known = _DrawRows(of(block), temperature_of(law.settings(block)), key, residual)
        return _draw(scores, block.number, known, tokens)

    target = TargetProbs(probs_at, prob_of, draw_block, uses_cond=False)
    sampled = judges.sampled(target, positions)
    return select(judges.is_sampled, sampled, greedy), sound


def probabilities_pallas_tpu(
    positions: Positions,
    law: Law,
    parts: SamplingParts,
    tokens: int,
) -> Float32[Array, "n V"]:
    """The distributions of all positions; see `api.probabilities`."""
    settings, allowed = law.settings(positions), law.allowed(positions)
    scores = _scores(positions, law, parts)
    measured = _measure(scores, positions.follower, settings, parts, tokens)
    best = jax.nn.one_hot(measured.best, allowed.shape[1])
    if not parts.sampled:
        return best
    return jnp.where(settings.temperature[:, None] > 0, measured.probs(allowed, settings), best)


def _scores(positions: Positions, law: Law, parts: SamplingParts) -> Float32[Array, "n V"]:
    """Allowed logits, but for ids that do not exist, which the kernels leave out themselves."""
    return positions.logits if parts.adjusted is False else law.allowed(positions)


def _lanes(columns: dict[int, jax.Array], rows: int, dtype: Any = jnp.float32) -> jax.Array:
    """[rows, LANES], in whole steps, with numbers of each row in some lanes."""
    packed = jnp.zeros((rows, max(columns) + 1), dtype)
    for lane, column in columns.items():
        packed = packed.at[:, lane].set(column.astype(dtype))
    return jnp.pad(packed, ((0, -rows % ROWS), (0, LANES - packed.shape[1])))


def _params(size: int, buffers: int) -> pltpu.CompilerParams:
    """Parameters for so many blocks of rows in VMEM."""
    return pltpu.CompilerParams(vmem_limit_bytes=_bytes(size, buffers))


def _bytes(size: int, buffers: int) -> int:
    return buffers * ROWS * (size + LANES) * 4 + _SPARE


def _on_every_device(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function as a call that each device of a mesh runs for itself, with whole arguments."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        return function
    whole = PartitionSpec()
    return jax.shard_map(
        function, in_specs=whole, out_specs=whole, axis_names=axes, check_vma=False
    )


def _measure(
    scores: Float32[Array, "n V"],
    follower: Int32[Array, "n"],
    settings: DrawSettings,
    parts: SamplingParts,
    tokens: int,
) -> Measured:
    rows, size = scores.shape
    options = MeasureOptions(tokens, bool(parts.sampled), bool(parts.truncated))
    columns = {
        RowInput().temperature: temperature_of(settings),
        RowInput().top_k: settings.top_k,
        RowInput().top_p: settings.top_p,
        RowInput().min_p: settings.min_p,
    }
    block = pl.BlockSpec((ROWS, LANES), lambda step: (step, 0))
    steps = pl.cdiv(rows, ROWS)
    call = pl.pallas_call(
        functools.partial(measure, options=options),
        grid=(steps,),
        in_specs=[pl.BlockSpec((ROWS, size), lambda step: (step, 0)), block, block],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct((steps * ROWS, LANES), jnp.float32),
        scratch_shapes=[pltpu.VMEM((ROWS, size), jnp.float32)] if options.truncated else [],
        compiler_params=_params(size, _BUFFERS if options.truncated else 2),
        cost_estimate=pl.CostEstimate(
            flops=rows * size * (4 + 2 * options.sampled + 150 * options.truncated),
            transcendentals=rows * size * options.sampled,
            bytes_accessed=4 * (rows * size + 3 * steps * ROWS * LANES),
        ),
        name="verify_measure",
    )
    given = scores, _lanes(columns, rows), _lanes({0: follower}, rows, jnp.int32)
    out = _on_every_device(call)(*given)[:rows]
    result = RowResult()
    return Measured(
        out[:, result.top],
        out[:, result.total],
        out[:, result.floor],
        out[:, result.chosen],
        out[:, result.best].astype(jnp.int32),
        out[:, result.sound] > 0,
    )


class _DrawRows(NamedTuple):
    """What draws from some rows depend on besides their logits."""

    measured: Measured
    temperature: Float32[Array, "n"]
    key: Key
    residual: Residual | None


def _draw(
    scores: Float32[Array, "rows V"],
    index: Int32[Array, "n"],
    known: _DrawRows,
    tokens: int,
) -> Int32[Array, "n"]:
    draws, size = index.shape[0], scores.shape[1]
    measured, residual, lane = known.measured, known.residual, Drawn()
    columns = {
        lane.temperature: known.temperature,
        lane.top: measured.top,
        lane.total: measured.total,
        lane.floor: measured.floor,
    }
    words = [jax.lax.bitcast_convert_type(word, jnp.int32) for word in known.key]
    steps = pl.cdiv(draws, ROWS)
    padding = steps * ROWS - draws
    block = pl.BlockSpec((ROWS, LANES), lambda step, *_: (step, 0))
    operands, specs = [], []
    scratch: list[Any] = [pltpu.VMEM((ROWS, size), jnp.float32), pltpu.SemaphoreType.DMA((1,))]
    if residual is not None:
        scale = residual.scale
        columns[lane.applies] = residual.applies
        columns[lane.scale] = jnp.ones(draws) if scale is None else scale
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

    out = _on_every_device(draw_rows)(
        jnp.pad(index, (0, padding)),
        scores,
        _lanes(columns, draws),
        _lanes(dict(enumerate(words)), draws, jnp.int32),
        *operands,
    )
    return out[:draws, 0]
