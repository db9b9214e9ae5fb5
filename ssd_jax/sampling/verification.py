"""Verification: the number of proposed tokens that the target accepts, and the bonus token.

Sampled rows are judged by a rule (`judgement`). Greedy rows accept a token iff it is the argmax,
under every rule. Autoregressive decoding is the case without proposals.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.kernels.rows import best_and_mass, map_rows, max_and_argmax, row_max
from ssd_jax.sampling import soundness, topology, truncation
from ssd_jax.sampling.judgement import judge
from ssd_jax.sampling.judgement.outcome import (
    Outcome,
    accept_equal,
    chain_outcome,
    count_leading_true,
)
from ssd_jax.sampling.judgement.positions import Normalisation, Positions, TargetProbs
from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.penalties import History, add_output, in_flight
from ssd_jax.sampling.probs import allowed_logits, probs, sampled_probs, temperature_of, weights_of
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.topology import Parents
from ssd_jax.sampling.variants import ON_DEVICE, Parts


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
    parents: Parents | None = None,
) -> Outcome:
    """Accepts proposed tokens and draws the bonus token.

    Args:
      logits: W = K + 1; row 0 follows the pending token, row i + 1 proposed token i.
      proposal: L = 0 is a row without proposed tokens.
      start: position of the round's pending token.
      history: committed tokens, including the pending one. It is not changed; see `commit`.
      tokens: number of ids that exist (see `probs`).
      rule: a name of `RULES`.
      parts: of sampling, as far as they are known.
      parents: the tree that the proposed tokens are; see `topology`. None is a chain.
    """
    positions, allowed = _positions(
        logits, proposal, sampling, start, history, tokens, parts, parents
    )
    arguments = positions, allowed, proposal, sampling, start, rule, parents
    if parts.sampled is None:
        outcome = _verify_with_cond(*arguments)
        checked = positions.path & ~outcome.path[positions.row] == 0
        is_sound = soundness.sound_of(checked, positions.logits, tokens)
    else:
        outcome, is_sound = _verify_in_few_passes(*arguments, parts, tokens)
    # Tokens after the first position whose logits give no distribution cannot be accepted, and a
    # bonus token that would come from such a position does not exist.
    is_sound = is_sound.reshape(start.shape[0], -1)
    if parents is None:
        sound = count_leading_true(is_sound)
        accepted = jnp.minimum(outcome.accepted, sound)
        bonus = jnp.where(sound > outcome.accepted, outcome.bonus, NO_TOKEN)
        return chain_outcome(accepted, bonus)
    is_checked = (positions.path & ~outcome.path[positions.row] == 0).reshape(is_sound.shape)
    unsound = is_checked & ~is_sound
    # The path up to its first unsound row.
    cut = outcome.path & chain_path(jnp.argmax(unsound, axis=1))
    any_unsound = unsound.any(axis=1)
    path = jnp.where(any_unsound, cut, outcome.path)
    bonus = jnp.where(any_unsound, NO_TOKEN, outcome.bonus)
    return Outcome(topology.depth_of(path), bonus, path)


def _verify_with_cond(
    positions: Positions,
    allowed: Callable[[Positions], jax.Array],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    rule: str,
    parents: Parents | None,
) -> Outcome:
    """`verify` where the device decides which parts of sampling are computed."""
    is_sampled = sampling.temperature > 0

    def greedy() -> Outcome:
        def best(block: Positions) -> jax.Array:
            score, token = max_and_argmax(allowed(block))
            return jnp.where(score > -jnp.inf, token, NO_TOKEN)  # all may be banned

        tokens = map_rows(best, positions).reshape(start.shape[0], -1)
        return accept_equal(tokens, proposal, parents)

    def sampled() -> Outcome:
        def probs_at(block: Positions) -> jax.Array:
            settings = sampling_of(sampling, block.row)
            return jax.lax.cond(
                jnp.any(settings.temperature > 0),
                lambda: sampled_probs(allowed(block), settings),
                lambda: jnp.zeros_like(block.logits),
            )

        def prob_of_proposed(block: Positions, token: jax.Array) -> jax.Array:
            return jax.lax.cond(
                jnp.any(topology.depth_of(block.path) < jnp.asarray(proposal.length)[block.row]),
                lambda: jnp.take_along_axis(probs_at(block), token[:, None], axis=-1)[:, 0],
                lambda: jnp.zeros(token.shape),
            )

        # Most positions need only one probability: the rest of p is not kept.
        target = TargetProbs(
            probs_at, lambda token: map_rows(prob_of_proposed, positions, token), uses_cond=True
        )
        return judge(rule, target, positions, proposal, sampling, start, parents)

    no_outcome = Outcome(*(jnp.zeros_like(start),) * 3)
    greedy_outcome = jax.lax.cond(jnp.all(is_sampled), lambda: no_outcome, greedy)
    sampled_outcome = jax.lax.cond(jnp.any(is_sampled), sampled, lambda: no_outcome)
    return jax.tree.map(
        lambda drawn, best: jnp.where(is_sampled, drawn, best), sampled_outcome, greedy_outcome
    )


def emitted_tokens(
    proposal: Proposal, outcome: Outcome, depth: int | None = None
) -> Int32[Array, "B W"]:
    """The emitted tokens: accepted ones, then the bonus token from place k on.

    Args:
      depth: most accepted tokens, W - 1, of a tree; None is a chain, where they are K.
    """
    tokens = jnp.asarray(proposal.tokens)
    if depth is not None:
        rows = topology.rows_of(outcome.path, depth, tokens.shape[1])[:, 1:]
        tokens = jnp.take_along_axis(tokens, jnp.maximum(rows - 1, 0), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1)))
    is_accepted = jnp.arange(tokens.shape[1]) < outcome.accepted[:, None]
    return jnp.where(is_accepted, tokens, outcome.bonus[:, None])


def target_probs(
    logits: Float32[Array, "B W V"],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    history: History,
    *,
    tokens: int,
    parts: Parts = ON_DEVICE,
    parents: Parents | None = None,
) -> Float32[Array, "B W V"]:
    """The target's distributions in a verification; arguments as in `verify`."""
    positions, allowed = _positions(
        logits, proposal, sampling, start, history, tokens, parts, parents
    )
    if parts.sampled:
        # The same numbers as in `_verify_in_few_passes`, so that no token it emits is reported as
        # impossible.
        scores, settings = allowed(positions), sampling_of(sampling, positions.row)
        greedy, normalisation = _normalisation(scores, settings, parts)
        sampled = _probs_of(
            normalisation, scores if normalisation.uncut is None else normalisation.uncut, settings
        )
        best = jax.nn.one_hot(greedy, scores.shape[1])
        return jnp.where(settings.temperature[:, None] > 0, sampled, best).reshape(logits.shape)

    def probs_of_block(block: Positions) -> jax.Array:
        return probs(allowed(block), sampling_of(sampling, block.row), parts.truncated)

    return map_rows(probs_of_block, positions).reshape(logits.shape)


def commit(
    history: History, proposal: Proposal, outcome: Outcome, live: Bool[Array, "B"]
) -> History:
    """Counts the accepted tokens and the bonus of the rows that are `live`."""
    is_accepted = topology.on_path(outcome.path, proposal.tokens.shape[1]) & live[:, None]
    accepted = jnp.where(is_accepted, proposal.tokens, -1)
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
    parents: Parents | None,
) -> tuple[Positions, Callable[[Positions], jax.Array]]:
    """All positions, and the allowed logits [n, V] of a block of them."""
    batch, count, vocab = logits.shape
    row = jnp.repeat(jnp.arange(batch), count)
    if parents is None:
        path = jnp.tile(topology.chain_paths(count - 1), batch)
    else:
        path = topology.paths(parents).reshape(-1)
    position = start[row] + 1 + topology.depth_of(path)
    positions = Positions(logits.reshape(-1, vocab), row, path, position)

    def allowed(block: Positions) -> jax.Array:
        return allowed_logits(
            block.logits,
            sampling_of(sampling, block.row),
            block.position,
            lambda: in_flight(history, proposal.tokens, block.row, block.path),
            tokens,
            adjusted=parts.adjusted,
        )

    return positions, allowed


def _verify_in_few_passes(
    positions: Positions,
    allowed: Callable[[Positions], jax.Array],
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    rule: str,
    parents: Parents | None,
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
        return accept_equal(greedy.reshape(start.shape[0], -1), proposal, parents), sound
    greedy, normalisation = _normalisation(scores, settings, parts)
    greedy_outcome = accept_equal(greedy.reshape(start.shape[0], -1), proposal, parents)
    positions = positions._replace(normalisation=normalisation)

    def probs_at(block: Positions) -> jax.Array:
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

    target = TargetProbs(probs_at, prob_of_proposed, uses_cond=False)
    sampled_outcome = judge(rule, target, positions, proposal, sampling, start, parents)
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
) -> tuple[Int32[Array, "n"], Normalisation]:
    """The best token of every position, and the numbers that turn its allowed logits into p."""
    best, greedy, total = best_and_mass(scores, temperature_of(settings)[:, None])
    top = best[:, None]
    if not parts.truncated:
        return greedy, Normalisation(top, total)
    uncut = jax.lax.optimization_barrier(weights_of(scores, settings, top) / total)
    return greedy, Normalisation(top, total, truncation.cut(uncut, settings), uncut)


def _probs_of(
    normalisation: Normalisation, values: Float32[Array, "n w"], settings: Sampling
) -> Float32[Array, "n w"]:
    """p of some tokens of every position.

    `values` is p before its cut, if that is kept, else the allowed logits. (Computing the former
    again could round differently and cut the last token that stays.)
    """
    if normalisation.cut is not None:
        return truncation.apply(values, normalisation.cut)
    return weights_of(values, settings, normalisation.top) / normalisation.total
