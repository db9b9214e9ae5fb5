"""Verification by two kernels: one measures every row of logits, one draws tokens from some rows.

Between them the rule decides, in XLA, by a few numbers of every row. No distribution is written to
memory, unless a rule asks for one (`TargetProbs.probs_at`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels import soundness
from ssd_jax.kernels.distribution import DrawSettings, temperature_of
from ssd_jax.kernels.noise import Key
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


class RowInput(NamedTuple):
    """Columns of what a kernel reads of a row to measure it, float32."""

    temperature: int = 0
    top_k: int = 1
    top_p: int = 2
    min_p: int = 3


class RowResult(NamedTuple):
    """Columns of what a kernel has measured of a row, float32."""

    top: int = 0  # largest logit
    total: int = 1  # of the weights that stay
    floor: int = 2  # least logit that stays
    chosen: int = 3  # logit of the row's token
    best: int = 4  # lowest id of the largest logit
    sound: int = 5  # 1 or 0


class DrawInput(NamedTuple):
    """Columns of what a kernel reads of a row to draw from it, float32."""

    temperature: int = 0
    top: int = 1
    total: int = 2
    floor: int = 3
    applies: int = 4  # 1: from the residual
    scale: int = 5


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


class MeasureOptions(NamedTuple):
    """What the kernel that measures is compiled for.

    Attributes:
      tokens: number of ids that exist.
      sampled, truncated: whether rows may have a temperature, and filters.
    """

    tokens: int
    sampled: bool
    truncated: bool


class MeasureRows(NamedTuple):
    """The rows to measure, all of them.

    Attributes:
      scores: allowed logits, whatever they are for ids that do not exist.
      follower: the token of each row whose logit is returned.
    """

    scores: Float32[Array, "n V"]
    follower: Int32[Array, "n"]
    settings: DrawSettings

    def columns(self) -> dict[int, jax.Array]:
        """Numbers of each row by their places in `RowInput`."""
        place, settings = RowInput(), self.settings
        return {
            place.temperature: temperature_of(settings),
            place.top_k: settings.top_k,
            place.top_p: settings.top_p,
            place.min_p: settings.min_p,
        }


class DrawRows(NamedTuple):
    """The rows to draw from: a token each.

    Attributes:
      scores: the logits of all rows.
      numbers: of the rows to draw from, among all.
      residual: None draws from p.
    """

    scores: Float32[Array, "rows V"]
    numbers: Int32[Array, "n"]
    measured: Measured
    temperature: Float32[Array, "n"]
    key: Key
    residual: Residual | None

    def columns(self) -> dict[int, jax.Array]:
        """Numbers of each row by their places in `DrawInput`."""
        place, measured, residual = DrawInput(), self.measured, self.residual
        columns = {
            place.temperature: self.temperature,
            place.top: measured.top,
            place.total: measured.total,
            place.floor: measured.floor,
        }
        if residual is not None:
            scale = residual.scale
            columns[place.applies] = residual.applies
            columns[place.scale] = jnp.ones(len(self.numbers)) if scale is None else scale
        return columns

    def words(self) -> list[Int32[Array, "n"]]:
        """The words of the keys, as kernels take them."""
        return [jax.lax.bitcast_convert_type(word, jnp.int32) for word in self.key]


class RowKernels(NamedTuple):
    """The kernels of a platform.

    Attributes:
      measure: measures rows.
      draw: draws tokens [n] int32 from rows, of which so many ids exist.
      support: most ids of a q that `draw` subtracts; None is any number.
    """

    measure: Callable[[MeasureRows, MeasureOptions], Measured]
    draw: Callable[[DrawRows, int], jax.Array]
    support: int | None = None


def verify_by(
    kernels: RowKernels,
    positions: Positions,
    law: Law,
    judges: Judges,
    parts: SamplingParts,
    tokens: int,
) -> tuple[Outcome, Bool[Array, "n"]]:
    """The outcome, and the soundness of all positions; see `api.verify`."""
    rows = _rows(positions, law, parts)
    measured = kernels.measure(rows, _options(parts, tokens))
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
        return measured.probs(measured.chosen[:, None], rows.settings)[:, 0]

    def draw(block: Positions, key: Key, residual: Residual | None) -> jax.Array:
        ids = 0 if residual is None else residual.support.shape[1]
        if kernels.support is not None and ids > kernels.support:
            return draw_from(probs_at, uses_cond=False)(block, key, residual)
        temperature = temperature_of(law.settings(block))
        drawn = DrawRows(rows.scores, block.number, of(block), temperature, key, residual)
        return kernels.draw(drawn, tokens)

    target = TargetProbs(probs_at, prob_of, draw, uses_cond=False)
    sampled = judges.sampled(target, positions)
    return select(judges.is_sampled, sampled, greedy), sound


def probabilities_by(
    kernels: RowKernels, positions: Positions, law: Law, parts: SamplingParts, tokens: int
) -> Float32[Array, "n V"]:
    """The distributions of all positions; see `api.probabilities`."""
    rows, allowed = _rows(positions, law, parts), law.allowed(positions)
    measured = kernels.measure(rows, _options(parts, tokens))
    best = jax.nn.one_hot(measured.best, allowed.shape[1])
    if not parts.sampled:
        return best
    probs = measured.probs(allowed, rows.settings)
    return jnp.where(rows.settings.temperature[:, None] > 0, probs, best)


def _rows(positions: Positions, law: Law, parts: SamplingParts) -> MeasureRows:
    # The kernels leave out ids that do not exist themselves.
    scores = positions.logits if parts.adjusted is False else law.allowed(positions)
    return MeasureRows(scores, positions.follower, law.settings(positions))


def _options(parts: SamplingParts, tokens: int) -> MeasureOptions:
    return MeasureOptions(tokens, bool(parts.sampled), bool(parts.truncated))


def measured_of(results: Float32[Array, "n columns"]) -> Measured:
    """What a kernel has measured, from its columns; see `RowResult`."""
    place = RowResult()
    return Measured(
        results[:, place.top],
        results[:, place.total],
        results[:, place.floor],
        results[:, place.chosen],
        results[:, place.best].astype(jnp.int32),
        results[:, place.sound] > 0,
    )


def pack(columns: dict[int, jax.Array], width: int, dtype: Any = jnp.float32) -> jax.Array:
    """[n, width], with numbers of each row in some columns and zeros in the others."""
    packed = jnp.zeros((len(next(iter(columns.values()))), width), dtype)
    for place, column in columns.items():
        packed = packed.at[:, place].set(column.astype(dtype))
    return packed


def on_every_device(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function as a call that each device of a mesh runs for itself, with all of its arguments,
    which devices that have only parts of them gather."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        return function
    replicated = PartitionSpec()
    return jax.shard_map(
        function, in_specs=replicated, out_specs=replicated, axis_names=axes, check_vma=False
    )
