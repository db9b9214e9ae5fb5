"""Verification: the number of proposed tokens that the target accepts, and the bonus token.

Ratio rule (Leviathan et al.; Chen et al.): accept x while u < p(x) / q(x); at the first rejection
draw the bonus from the residual max(p - q, 0), after L acceptances from p. The distribution of
the emitted tokens is exactly the target's, whatever q is.

Coupled rule: the token at a position is argmax(log p + Gumbel(seed, request, position)); a proposed
token is accepted iff it is that token. The text does not depend on the proposals at all.

Greedy rows accept a token iff it is the argmax, under both rules. Autoregressive decoding is the
case without proposals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from ssd_jax.kernels.rows import best_and_mass, map_rows, max_and_argmax, row_max, take_rows
from ssd_jax.sampling import keys, soundness, truncation
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.penalties import History, add_output, in_flight
from ssd_jax.sampling.probs import allowed_logits, probs, sampled_probs, temperature_of, weights_of
from ssd_jax.sampling.proposal import Proposal, dense, q_of_tokens
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.truncation import Cut
from ssd_jax.sampling.variants import ON_DEVICE, Parts


class Outcome(NamedTuple):
    """The verification outcome (k, t*) of each row."""

    accepted: Int32[Array, "B"]  # k in 0..L
    bonus: Int32[Array, "B"]  # t*; `NO_TOKEN` where no token can be drawn


class _Normalisation(NamedTuple):
    """What turns allowed logits into p, if it is computed for all positions at once."""

    top: Float32[Array, "n 1"]  # largest allowed logit
    total: Float32[Array, "n 1"]  # of the weights
    cut: Cut | None = None
    uncut: Float32[Array, "n V"] | None = None  # p before its cut, if there is one


class _Positions(NamedTuple):
    """The n = B * (K + 1) positions of a verification, or a block of them."""

    logits: Float32[Array, "n V"]
    row: Int32[Array, "n"]  # sequence of each
    depth: Int32[Array, "n"]  # proposed tokens before it
    position: Int32[Array, "n"]  # of the token it predicts
    normalisation: _Normalisation | None = None


class _TargetProbs(NamedTuple):
    """The target's p; anything in greedy rows.

    Attributes:
      probs_at: p [n, V] float32 at a block of positions.
      prob_of: p [n] float32 of a token [n] at every position, where a proposed token may be.
      uses_cond: whether the device decides what is computed.
    """

    probs_at: Callable[[_Positions], jax.Array]
    prob_of: Callable[[jax.Array], jax.Array]
    uses_cond: bool


def verify(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    history: History,
    *,
    tokens: int,
    rule: str = "ratio",
    parts: Parts = ON_DEVICE,
) -> Outcome:
    """Accepts proposed tokens and draws the bonus token.

    Args:
      logits: W = K + 1; row i follows the pending token and the first i proposed tokens.
      proposal: L = 0 is a row without proposed tokens.
      start: position of the round's pending token.
      history: committed tokens, including the pending one. It is not changed; see `commit`.
      tokens: number of ids that exist (see `probs`).
      rule: "ratio" or "coupled".
      parts: of sampling, as far as they are known.
    """
    positions, allowed = _positions(logits, proposal, sampling, start, history, tokens, parts)
    arguments = positions, allowed, proposal, sampling, start, rule
    if parts.sampled is None:
        accepted, bonus = _verify_with_cond(*arguments)
        checked = positions.depth <= accepted[positions.row]
        is_sound = soundness.sound_of(checked, positions.logits, tokens)
    else:
        (accepted, bonus), is_sound = _verify_in_few_passes(*arguments, parts, tokens)
    # Tokens after the first position whose logits give no distribution cannot be accepted, and a
    # bonus token that would come from such a position does not exist.
    sound = _count_leading_true(is_sound.reshape(accepted.shape[0], -1))
    bonus = jnp.where(sound > accepted, bonus, NO_TOKEN)
    return Outcome(jnp.minimum(accepted, sound), bonus)


def _verify_with_cond(
    positions: _Positions,
    allowed: Callable[[_Positions], jax.Array],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    rule: str,
) -> Outcome:
    """`verify` where the device decides which parts of sampling are computed."""
    is_sampled = sampling.temperature > 0

    def greedy() -> Outcome:
        def best(block: _Positions) -> jax.Array:
            score, token = max_and_argmax(allowed(block))
            return jnp.where(score > -jnp.inf, token, NO_TOKEN)  # all may be banned

        return _accept_equal(map_rows(best, positions).reshape(start.shape[0], -1), proposal)

    def sampled() -> Outcome:
        def probs_at(block: _Positions) -> jax.Array:
            settings = sampling_of(sampling, block.row)
            return jax.lax.cond(
                jnp.any(settings.temperature > 0),
                lambda: sampled_probs(allowed(block), settings),
                lambda: jnp.zeros_like(block.logits),
            )

        def prob_of_proposed(block: _Positions, token: jax.Array) -> jax.Array:
            return jax.lax.cond(
                jnp.any(block.depth < jnp.asarray(proposal.length)[block.row]),
                lambda: jnp.take_along_axis(probs_at(block), token[:, None], axis=-1)[:, 0],
                lambda: jnp.zeros(token.shape),
            )

        # Most positions need only one probability: the rest of p is not kept.
        target = _TargetProbs(
            probs_at, lambda token: map_rows(prob_of_proposed, positions, token), uses_cond=True
        )
        return _apply_rule(rule, target, positions, proposal, sampling, start)

    no_outcome = Outcome(jnp.zeros_like(start), jnp.zeros_like(start))
    greedy_outcome = jax.lax.cond(jnp.all(is_sampled), lambda: no_outcome, greedy)
    sampled_outcome = jax.lax.cond(jnp.any(is_sampled), sampled, lambda: no_outcome)
    return jax.tree.map(
        lambda drawn, best: jnp.where(is_sampled, drawn, best), sampled_outcome, greedy_outcome
    )


def emitted_tokens(proposal: Proposal, outcome: Outcome) -> Int32[Array, "B K+1"]:
    """The emitted tokens: accepted ones, then the bonus token from place k on."""
    index = jnp.arange(proposal.tokens.shape[1] + 1)
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    kept = index < outcome.accepted[:, None]
    return jnp.where(kept, tokens, outcome.bonus[:, None])


def target_probs(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    history: History,
    *,
    tokens: int,
    parts: Parts = ON_DEVICE,
) -> Float32[Array, "B W V"]:
    """The target's distributions in a verification; arguments as in `verify`."""
    positions, allowed = _positions(logits, proposal, sampling, start, history, tokens, parts)
    if parts.sampled:
        # The same numbers as in `_at_once`, so that no token it emits is reported as impossible.
        scores, settings = allowed(positions), sampling_of(sampling, positions.row)
        greedy, normalisation = _normalisation(scores, settings, parts)
        sampled = _probs_of(
            normalisation, scores if normalisation.uncut is None else normalisation.uncut, settings
        )
        best = jax.nn.one_hot(greedy, scores.shape[1])
        return jnp.where(settings.temperature[:, None] > 0, sampled, best).reshape(logits.shape)

    def probs_of_block(block: _Positions) -> jax.Array:
        return probs(allowed(block), sampling_of(sampling, block.row), parts.truncated)

    return map_rows(probs_of_block, positions).reshape(logits.shape)


def commit(
    history: History, proposal: Proposal, outcome: Outcome, live: Bool[Array, "B"]
) -> History:
    """Counts the accepted tokens and the bonus of the rows that are `live`."""
    index = jnp.arange(proposal.tokens.shape[1])
    kept = (index < outcome.accepted[:, None]) & live[:, None]
    accepted = jnp.where(kept, proposal.tokens, -1)
    bonus = jnp.where(live, outcome.bonus, -1)[:, None]
    return add_output(history, jnp.concatenate([accepted, bonus], axis=1))


def _positions(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    history: History,
    tokens: int,
    parts: Parts,
) -> tuple[_Positions, Callable[[_Positions], jax.Array]]:
    """All positions, and the allowed logits [n, V] of a block of them."""
    batch, count, vocab = logits.shape
    row = jnp.repeat(jnp.arange(batch), count)
    depth = jnp.tile(jnp.arange(count), batch)
    positions = _Positions(logits.reshape(-1, vocab), row, depth, start[row] + 1 + depth)

    def allowed(block: _Positions) -> jax.Array:
        return allowed_logits(
            block.logits,
            sampling_of(sampling, block.row),
            block.position,
            lambda: in_flight(history, proposal.tokens, block.row, block.depth),
            tokens,
            adjusted=parts.adjusted,
        )

    return positions, allowed


def _verify_in_few_passes(
    positions: _Positions,
    allowed: Callable[[_Positions], jax.Array],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    rule: str,
    parts: Parts,
    tokens: int,
) -> tuple[Outcome, Bool[Array, "n"]]:
    """`verify` for all positions at once, without data-dependent control flow, and their soundness.

    The aim is few passes over the logits: a pass finds a few numbers a position, and p is computed
    from these where it is read. p is kept where thresholds are searched in it.
    """
    scores, settings = allowed(positions), sampling_of(sampling, positions.row)
    if not parts.sampled:
        greedy, sound = soundness.best_and_sound(scores, positions.logits, tokens)
        if parts.adjusted is not False:
            sound &= row_max(scores)[:, 0] > -jnp.inf
        return _accept_equal(greedy.reshape(start.shape[0], -1), proposal), sound
    greedy, normalisation = _normalisation(scores, settings, parts)
    greedy_outcome = _accept_equal(greedy.reshape(start.shape[0], -1), proposal)
    positions = positions._replace(normalisation=normalisation)

    def probs_at(block: _Positions) -> jax.Array:
        block_normalisation = block.normalisation
        assert block_normalisation is not None
        values = allowed(block) if block_normalisation.uncut is None else block_normalisation.uncut
        return _probs_of(block_normalisation, values, sampling_of(sampling, block.row))

    def prob_of_proposed(token: jax.Array) -> jax.Array:
        # This sum joins the pass that finds the best token; a look-up would be another pass.
        is_token = jnp.arange(scores.shape[1]) == token[:, None]
        values = jnp.where(
            is_token, scores if normalisation.uncut is None else normalisation.uncut, 0.0
        )
        return _probs_of(normalisation, values.sum(axis=-1, keepdims=True), settings)[:, 0]

    target = _TargetProbs(probs_at, prob_of_proposed, uses_cond=False)
    sampled_outcome = _apply_rule(rule, target, positions, proposal, sampling, start)
    is_sampled = sampling.temperature > 0
    outcome = jax.tree.map(
        lambda settings, best: jnp.where(is_sampled, settings, best),
        sampled_outcome,
        greedy_outcome,
    )
    sound = soundness.sound(positions.logits, tokens)
    if parts.adjusted is not False:  # bans may leave nothing
        sound &= normalisation.top[:, 0] > -jnp.inf
    return outcome, sound


def _normalisation(
    scores: Float32[Array, "n V"], settings: Sampling, parts: Parts
) -> tuple[Int32[Array, "n"], _Normalisation]:
    """The best token of every position, and the numbers that turn its allowed logits into p."""
    best, greedy, total = best_and_mass(scores, temperature_of(settings)[:, None])
    top = best[:, None]
    if not parts.truncated:
        return greedy, _Normalisation(top, total)
    uncut = jax.lax.optimization_barrier(weights_of(scores, settings, top) / total)
    return greedy, _Normalisation(top, total, truncation.cut(uncut, settings), uncut)


def _probs_of(
    normalisation: _Normalisation, values: Float32[Array, "n w"], settings: Sampling
) -> Float32[Array, "n w"]:
    """p of some tokens of every position.

    `values` is p before its cut, if that is kept, else the allowed logits. (Computing the former
    again could round differently and cut the last token that stays.)
    """
    if normalisation.cut is not None:
        return truncation.apply(values, normalisation.cut)
    return weights_of(values, settings, normalisation.top) / normalisation.total


def _accept_equal(target: Int32[Array, "B W"], proposal: Proposal) -> Outcome:
    """Accepts proposed tokens while they equal the target's own."""
    equal = (proposal.tokens == target[:, :-1]) & _proposed(proposal)
    accepted = _count_leading_true(equal)
    return Outcome(accepted, _take_column(target, accepted))


def _apply_rule(rule: str, *arguments: Any) -> Outcome:
    return {"ratio": _ratio, "coupled": _coupled}[rule](*arguments)


def _coupled(
    target: _TargetProbs,
    positions: _Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
) -> Outcome:
    settings = sampling_of(sampling, positions.row)
    # The noise depends on the absolute position only: this key has no start.
    no_start = jnp.zeros_like(positions.position)
    key = keys.derive(settings.seed, settings.request, no_start, positions.position, Purpose.TOKEN)

    def draw(block: _Positions, key: keys.Key) -> jax.Array:
        p = target.probs_at(block)
        return _no_token_where_zero(
            keys.gumbel_max(p, key, check_blocks=target.uses_cond), p, target
        )

    drawn = map_rows(draw, positions, key)
    return _accept_equal(drawn.reshape(start.shape[0], -1), proposal)


def _ratio(
    target: _TargetProbs,
    positions: _Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
) -> Outcome:
    vocab = positions.logits.shape[1]
    width = proposal.tokens.shape[1] + 1
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1))).reshape(-1)
    p_token = target.prob_of(tokens).reshape(-1, width)[:, :-1]
    settings = sampling_of(sampling, positions.row)
    key = keys.derive(
        settings.seed, settings.request, start[positions.row], positions.position, Purpose.ACCEPT
    )
    u = keys.uniform(key).reshape(-1, width)[:, :-1]
    q_token = q_of_tokens(proposal)
    # u < p / q without a division; u < 1, so p >= q is always accepted and p = 0 never. A token
    # outside the support of q was not drawn from it.
    accepted = _count_leading_true((u * q_token < p_token) & (q_token > 0) & _proposed(proposal))

    index = jnp.arange(accepted.shape[0]) * width + accepted
    final = jax.tree.map(lambda a: take_rows(a, index), positions)
    key = keys.derive(sampling.seed, sampling.request, start, final.position, Purpose.BONUS)

    def bonus(final: _Positions, support, q, rejected, key: keys.Key) -> jax.Array:
        p_final, q_final = target.probs_at(final), dense(support, q, vocab)
        residual = jnp.where(rejected, jnp.maximum(p_final - q_final, 0.0), p_final)
        # If rounding left nothing of the residual, p and q are equal in float32: draw from p.
        residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p_final)
        return _no_token_where_zero(
            keys.gumbel_max(residual, key, check_blocks=target.uses_cond), p_final, target
        )

    # A q that is no number has rejected its token; the bonus token is then drawn from p.
    q = jnp.where(jnp.isfinite(proposal.q), proposal.q, 0.0)
    q_padded = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    support = jnp.pad(proposal.support, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
    rejected = (accepted < proposal.length)[:, None]
    drafted = (_take_column(support, accepted), _take_column(q_padded, accepted))
    return Outcome(accepted, map_rows(bonus, final, *drafted, rejected, key))


def _no_token_where_zero(
    tokens: Int32[Array, "n"], p: Float32[Array, "n V"], target: _TargetProbs
) -> Int32[Array, "n"]:
    """Tokens drawn from p, `NO_TOKEN` where p has none; without `cond`, the logits show that."""
    return jnp.where(jnp.any(p > 0, axis=-1), tokens, NO_TOKEN) if target.uses_cond else tokens


def _proposed(proposal: Proposal) -> Bool[Array, "B K"]:
    """Positions below L."""
    return jnp.arange(proposal.tokens.shape[1]) < proposal.length[:, None]


def _count_leading_true(flags: Bool[Array, "B K"]) -> Int32[Array, "B"]:
    """Number of leading entries of each row that are true."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _take_column(
    array: Shaped[Array, "B n ..."], index: Int32[Array, "B"]
) -> Shaped[Array, "B ..."]:
    """array[b, index[b]]."""
    expanded = index.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.take_along_axis(array, expanded, axis=1)[:, 0]
