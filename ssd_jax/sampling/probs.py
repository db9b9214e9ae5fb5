"""The distribution that tokens are drawn from, computed from logits and a request's settings.

Order: banned ids, bad words and vocabulary padding, penalties, bias, temperature, top-k, top-p,
min-p; each filter acts on the renormalised result of the one before. A filter keeps every token at
or above a threshold probability, ties included, so that every backend finds the same set.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.rows import argmax, row_max, row_sum, top_k
from ssd_jax.sampling import bad_words, truncation
from ssd_jax.sampling.outputs import Outputs, every_id
from ssd_jax.sampling.penalties import GetHistory, penalise
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import when

_BLOCK = 128
_HEAD_BLOCKS = (
    64,
    256,
)  # numbers of blocks in which the likeliest tokens are searched, fewest first

Probs = Float32[Array, "B V"]
TopK = tuple[Float32[Array, "B n"], Int32[Array, "B n"]]
"""The largest values of each row, descending, and their columns."""
Threshold = Callable[[jax.Array], jax.Array]
"""Returns the least probability that stays, [B, 1]."""


def allowed_logits(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    positions: Int32[Array, "B"],
    get_history: GetHistory,
    tokens: int,
    outputs: Outputs = None,
    adjusted: bool | None = None,
) -> Float32[Array, "B V"]:
    """Logits after everything that comes before the temperature.

    -inf at banned ids, at ids that complete a bad word, and at ids >= tokens (vocabulary padding);
    penalties and bias applied. With `outputs` the logits have columns for these ids only.
    `adjusted` is the field of `Parts`.
    """
    ids = every_id(outputs, logits.shape[1])
    if outputs is not None or tokens < logits.shape[1]:
        logits = jnp.where(ids < tokens, logits, -jnp.inf)
    ban_active = positions < sampling.ban_before

    def ban(logits: jax.Array) -> jax.Array:
        is_banned = jnp.any(ids[None, :, None] == sampling.banned[:, None, :], axis=-1)
        logits = jnp.where(is_banned & ban_active[:, None], -jnp.inf, logits)
        return bad_words.ban(logits, sampling, get_history(), outputs)

    any_banned = jnp.any(ban_active | bad_words.have_any(sampling))
    logits = when(adjusted, any_banned, ban, lambda logits: logits, logits)
    return penalise(logits, sampling, get_history, outputs, adjusted)


def probs(
    allowed: Float32[Array, "B V"], sampling: Sampling, truncated: bool | None = None
) -> Probs:
    """The distributions that tokens are drawn from, given allowed logits.

    A greedy row is one-hot at the best token, the lowest id on ties.
    """
    greedy = jax.nn.one_hot(argmax(allowed), allowed.shape[1])
    sampled = sampled_probs(allowed, sampling, truncated)
    return jnp.where(sampling.temperature[:, None] > 0, sampled, greedy)


def sampled_probs(
    allowed: Float32[Array, "B V"], sampling: Sampling, truncated: bool | None = None
) -> Probs:
    """`probs` of sampled rows; greedy rows get temperature 1.

    `truncated` is the field of `Parts`: if False, no row may have a filter.
    """
    weights = weights_of(allowed, sampling, row_max(allowed))
    return _truncate(weights / row_sum(weights), sampling, truncated)


def weights_of(
    allowed: Float32[Array, "B n"], sampling: Sampling, top: Float32[Array, "B 1"]
) -> Float32[Array, "B n"]:
    """`sampled_probs` before truncation, not normalised, for any tokens of the rows.

    `top` is the largest allowed logit of each row.
    """
    # The maximum is subtracted first: at low temperatures the quotients themselves would overflow.
    return jnp.exp((allowed - top) / temperature_of(sampling)[:, None])


def temperature_of(sampling: Sampling) -> Float32[Array, "B"]:
    """The temperatures, 1 for greedy rows."""
    return jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)


def likeliest_probs(
    allowed: Float32[Array, "B V"],
    count: int,
    sampling: Sampling,
    truncated: bool | None = None,
    largest: TopK | None = None,
) -> tuple[Float32[Array, "B {count}"], Int32[Array, "B {count}"]]:
    """`sampled_probs` of the `count` likeliest tokens only, renormalised, and their ids.

    This needs no pass over all tokens for each filter. (A top-k beyond `count` does not affect what
    top-p keeps.) Probabilities are 0 where filtered out. `largest` holds at least the `count`
    largest logits, if they are known.
    """
    best, ids = (a[:, :count] for a in largest or top_k(allowed, count))
    top = best[:, :1]
    total = row_sum(weights_of(allowed, sampling, top))
    capped = sampling._replace(top_k=jnp.where(sampling.top_k > count, 0, sampling.top_k))
    p = _truncate(weights_of(best, sampling, top) / total, capped, truncated)
    return p / row_sum(p), ids


def _truncate(p: Probs, sampling: Sampling, truncated: bool | None = None) -> Probs:
    """p after top-k, top-p and min-p; a filter that asks for more than all of p keeps all."""
    if truncated is not None:
        return truncation.apply(p, truncation.cut(p, sampling)) if truncated else p
    top_k, top_p, min_p = sampling.top_k[:, None], sampling.top_p[:, None], sampling.min_p[:, None]
    p = _filter(p, top_k > 0, lambda p: _threshold(p, lambda kept: truncation.count(kept) >= top_k))
    p = _filter(p, top_p < 1, lambda p: _threshold(p, lambda kept: row_sum(kept) >= top_p))
    return _filter(p, min_p > 0, lambda p: min_p * row_max(p))


def _filter(p: Probs, applies: Bool[Array, "B 1"], threshold: Threshold) -> Probs:
    """Keeps tokens with p >= threshold(p) and renormalises, in the rows where it applies."""

    def keep(p: jax.Array) -> jax.Array:
        # The likeliest token always stays, whatever rounding does to the threshold.
        low = jnp.minimum(threshold(p), row_max(p))
        kept = jnp.where(p >= low, p, 0.0)
        kept = kept / row_sum(kept)
        return jnp.where(applies, kept, p)

    return jax.lax.cond(jnp.any(applies), keep, lambda p: p, p)


def _threshold(p: Probs, enough: truncation.Enough) -> Float32[Array, "B 1"]:
    """The largest threshold whose kept set is enough (0 if none is).

    It is first searched among the likeliest tokens: those in the blocks with the largest maxima.
    These hold the whole kept set if no other block reaches the threshold. A row for which that is
    so keeps its threshold when other rows are searched further, since other sums round differently.
    """
    blocks = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK))).reshape(p.shape[0], -1, _BLOCK)
    maxima = row_max(blocks)[..., 0]

    def search(heads: tuple[int, ...]) -> jax.Array:
        if not heads:
            return _bisect(p, enough)
        size, *larger = heads
        best, index = jax.lax.top_k(maxima, size + 1)
        head = jnp.take_along_axis(blocks, index[:, :size, None], axis=1).reshape(p.shape[0], -1)
        threshold = _bisect(head, enough)
        is_exact = threshold > best[:, size:]
        return jax.lax.cond(
            jnp.all(is_exact),
            lambda: threshold,
            lambda: jnp.where(is_exact, threshold, search(tuple(larger))),
        )

    return search(tuple(size for size in _HEAD_BLOCKS if 2 * size <= maxima.shape[1]))


def _bisect(p: Probs, enough: truncation.Enough) -> Float32[Array, "B 1"]:
    """`_threshold` by bisection.

    Non-negative floats order like their bits, and every float32 is a candidate, so the set found is
    the smallest one closed under ties. A row whose likeliest token is enough needs no search.
    """

    def value(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        ok = enough(jnp.where(p >= value(middle), p, 0.0))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    best = row_max(p)
    high = jax.lax.bitcast_convert_type(best, jnp.int32)
    low = jnp.where(enough(jnp.where(p >= best, p, 0.0)), high, 0)
    low, _ = jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
    return value(low)
