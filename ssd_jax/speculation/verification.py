"""Verification: how many proposed tokens the target accepts, and the bonus token after them.

Ratio rule (Leviathan et al.; Chen et al.): accept x while u < p(x) / q(x); at the first rejection
draw the bonus from the residual max(p - q, 0), after L acceptances from p. The law of the emitted
tokens is exactly the target's, whatever q is.

Coupled rule: the token at a position is argmax(log p + Gumbel(seed, request, position)); a proposed
token is accepted iff it is that token. The text does not depend on the proposals at all.

Greedy rows accept a token iff it is the argmax, under both rules. Autoregressive decoding is the
case without proposals.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.speculation import keys
from ssd_jax.speculation.history import History, add_output, in_flight
from ssd_jax.speculation.keys import Purpose
from ssd_jax.speculation.probs import allowed_logits, probs, sampled_probs
from ssd_jax.speculation.proposal import Proposal, dense, of_token
from ssd_jax.speculation.settings import Sampling, repeat_rows


class Outcome(NamedTuple):
    """The verification outcome (k, t*) of each row.

    Attributes:
      accepted: [B] int32, k in 0..L.
      bonus: [B] int32, t*.
    """

    accepted: jax.Array
    bonus: jax.Array


class _Rows(NamedTuple):
    """The K + 1 positions of a verification."""

    allowed: jax.Array  # [B, K + 1, V] float32, logits before the temperature
    best: jax.Array  # [B, K + 1] int32, their argmax
    positions: jax.Array  # [B, K + 1] int32, of the token that each row predicts


def verify(
    logits: jax.Array,
    proposal: Proposal,
    sampling: Sampling,
    start: jax.Array,
    history: History,
    *,
    tokens: int,
    rule: str = "ratio",
) -> Outcome:
    """Accepts proposed tokens and draws the bonus token.

    Args:
      logits: [B, K + 1, V] float32; row i follows the pending token and the first i proposed ones.
      proposal: K proposed tokens a row; L = 0 is a row without.
      sampling: settings of the rows.
      start: [B] int32, position of the round's pending token.
      history: committed tokens, the pending one included.
      tokens: how many ids exist (see `probs`).
      rule: "ratio" or "coupled".

    Returns: the outcome. `history` is not changed; see `commit`.
    """
    rows = _prepare(logits, proposal, sampling, start, history, tokens)
    greedy = _leading(rows.best, proposal)

    def sampled() -> Outcome:
        draw = {"ratio": _ratio, "coupled": _coupled}[rule](rows, proposal, sampling, start)
        hot = sampling.temperature > 0
        return Outcome(
            jnp.where(hot, draw.accepted, greedy.accepted), jnp.where(hot, draw.bonus, greedy.bonus)
        )

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, lambda: greedy)


def emitted(proposal: Proposal, outcome: Outcome) -> jax.Array:
    """The emitted tokens [B, K + 1] int32: accepted ones, then the bonus at k and after."""
    index = jnp.arange(proposal.tokens.shape[1] + 1)
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    kept = index < outcome.accepted[:, None]
    return jnp.where(kept, tokens, outcome.bonus[:, None])


def law(
    logits: jax.Array,
    proposal: Proposal,
    sampling: Sampling,
    start: jax.Array,
    history: History,
    *,
    tokens: int,
) -> jax.Array:
    """The target's distributions [B, K + 1, V] of a verification; arguments as `verify`."""
    batch, count, vocab = logits.shape
    positions = start[:, None] + 1 + jnp.arange(count)
    flat = probs(
        logits.reshape(batch * count, vocab),
        repeat_rows(sampling, count),
        positions.reshape(-1),
        in_flight(history, proposal.tokens),
        tokens,
    )
    return flat.reshape(logits.shape)


def commit(history: History, proposal: Proposal, outcome: Outcome, live: jax.Array) -> History:
    """Counts the accepted tokens and the bonus of the rows that are `live` [B] bool."""
    index = jnp.arange(proposal.tokens.shape[1])
    kept = (index < outcome.accepted[:, None]) & live[:, None]
    accepted = jnp.where(kept, proposal.tokens, -1)
    bonus = jnp.where(live, outcome.bonus, -1)[:, None]
    return add_output(history, jnp.concatenate([accepted, bonus], axis=1))


def _prepare(
    logits: jax.Array,
    proposal: Proposal,
    sampling: Sampling,
    start: jax.Array,
    history: History,
    tokens: int,
) -> _Rows:
    batch, count, vocab = logits.shape
    positions = start[:, None] + 1 + jnp.arange(count)
    allowed = allowed_logits(
        logits.reshape(batch * count, vocab),
        repeat_rows(sampling, count),
        positions.reshape(-1),
        in_flight(history, proposal.tokens),
        tokens,
    )
    best = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    return _Rows(allowed.reshape(logits.shape), best.reshape(batch, count), positions)


def _leading(target: jax.Array, proposal: Proposal) -> Outcome:
    """Accepts proposed tokens while they equal the target's own tokens [B, K + 1]."""
    equal = (proposal.tokens == target[:, :-1]) & _proposed(proposal)
    accepted = _leading_true(equal)
    return Outcome(accepted, _at(target, accepted))


def _coupled(rows: _Rows, proposal: Proposal, sampling: Sampling, _start: jax.Array) -> Outcome:
    batch, count, vocab = rows.allowed.shape
    many = repeat_rows(sampling, count)
    p = sampled_probs(rows.allowed.reshape(batch * count, vocab), many)
    positions = rows.positions.reshape(-1)
    # The only noise is that of the absolute position: there is no start in this key.
    key = keys.derive(many.seed, many.request, jnp.zeros_like(positions), positions, Purpose.TOKEN)
    drawn = jnp.argmax(jnp.log(p) + keys.gumbel(key, vocab), axis=-1).astype(jnp.int32)
    return _leading(drawn.reshape(batch, count), proposal)


def _ratio(rows: _Rows, proposal: Proposal, sampling: Sampling, start: jax.Array) -> Outcome:
    batch, count, vocab = rows.allowed.shape
    many = repeat_rows(sampling, count)
    p = sampled_probs(rows.allowed.reshape(batch * count, vocab), many).reshape(rows.allowed.shape)
    p_token = jnp.take_along_axis(p[:, :-1], proposal.tokens[:, :, None], axis=-1)[..., 0]
    starts = jnp.repeat(start, count)
    key = keys.derive(many.seed, many.request, starts, rows.positions.reshape(-1), Purpose.ACCEPT)
    u = keys.uniform(key).reshape(batch, count)[:, :-1]
    # u < p / q without a division; u < 1, so p >= q is always accepted and p = 0 never.
    accepted = _leading_true((u * of_token(proposal) < p_token) & _proposed(proposal))

    p_last = _at(p, accepted)
    padded = jnp.pad(proposal.q, ((0, 0), (0, 1), (0, 0)))
    support = jnp.pad(proposal.support, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
    q_last = dense(_at(support, accepted), _at(padded, accepted), vocab)
    rejected = (accepted < proposal.length)[:, None]
    residual = jnp.where(rejected, jnp.maximum(p_last - q_last, 0.0), p_last)
    # If rounding left nothing of the residual, p and q are equal to float32: draw from p.
    residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p_last)
    position = _at(rows.positions, accepted)
    key = keys.derive(sampling.seed, sampling.request, start, position, Purpose.BONUS)
    bonus = jnp.argmax(jnp.log(residual) + keys.gumbel(key, vocab), axis=-1)
    return Outcome(accepted, bonus.astype(jnp.int32))


def _proposed(proposal: Proposal) -> jax.Array:
    """[B, K] bool: positions below L."""
    return jnp.arange(proposal.tokens.shape[1]) < proposal.length[:, None]


def _leading_true(flags: jax.Array) -> jax.Array:
    """How many leading entries of each row [B, K] are true, int32."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[b, index[b]] for array [B, n, ...] and index [B]."""
    expanded = index.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.take_along_axis(array, expanded, axis=1)[:, 0]
