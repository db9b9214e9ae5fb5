"""Verification: the number of proposed tokens that the target accepts, and the bonus token.

Sampled rows are judged by a rule (`judgement`). Greedy rows accept a token iff it is the argmax,
under every rule. Autoregressive decoding is the case without proposals.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.verify import api
from ssd_jax.kernels.verify.positions import Judges, Law, Outcome, Positions, TargetProbs
from ssd_jax.sampling import topology
from ssd_jax.sampling.judgement import judge
from ssd_jax.sampling.judgement.outcome import accept_equal
from ssd_jax.sampling.penalties import History, add_output, in_flight
from ssd_jax.sampling.probs import allowed_logits, only_allowed
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.topology import Parents
from ssd_jax.sampling.variants import ON_DEVICE, Parts

Masks = Int32[Array, "B W mask"]


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
    masks: Masks | None = None,
    backend: str = "xla",
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
      masks: of each row of logits, see `masks`; rows behind a proposed token that is not allowed
        may have any. None allows all tokens; `parts` without `adjusted` have none.
      backend: see `kernels/verify/api.py`.
    """
    positions, law = _positions(
        logits, proposal, sampling, start, history, tokens, parts, parents, masks
    )

    def greedy(best: Int32[Array, "n"]) -> Outcome:
        return accept_equal(best.reshape(start.shape[0], -1), proposal, parents)

    def sampled(target: TargetProbs, positions: Positions) -> Outcome:
        return judge(rule, target, positions, proposal, sampling, start, parents)

    judges = Judges(sampling.temperature > 0, greedy, sampled)
    return api.verify(positions, law, judges, parts=parts, tokens=tokens, backend=backend)


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
    masks: Masks | None = None,
    backend: str = "xla",
) -> Float32[Array, "B W V"]:
    """The target's distributions in a verification; arguments as in `verify`."""
    positions, law = _positions(
        logits, proposal, sampling, start, history, tokens, parts, parents, masks
    )
    p = api.probabilities(positions, law, parts=parts, tokens=tokens, backend=backend)
    return p.reshape(logits.shape)


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
    masks: Masks | None,
) -> tuple[Positions, Law]:
    """All positions, and what turns their logits into distributions."""
    batch, count, vocab = logits.shape
    row = jnp.repeat(jnp.arange(batch), count)
    if parents is None:
        path = jnp.tile(topology.chain_paths(count - 1), batch)
    else:
        path = topology.paths(parents).reshape(-1)
    position = start[row] + 1 + topology.depth_of(path)
    is_inner = topology.depth_of(path) < jnp.asarray(proposal.length)[row]
    follower = jnp.pad(proposal.tokens, ((0, 0), (0, 1))).reshape(-1)
    every = jnp.arange(batch * count)
    flat = logits.reshape(-1, vocab)
    positions = Positions(flat, row, path, position, is_inner, follower, every)

    def settings(block: Positions) -> Sampling:
        return sampling_of(sampling, block.row)

    def allowed(block: Positions) -> Float32[Array, "n V"]:
        logits = block.logits
        if masks is not None:
            logits = only_allowed(logits, masks.reshape(batch * count, -1)[block.number])
        return allowed_logits(
            logits,
            settings(block),
            block.position,
            lambda: in_flight(history, proposal.tokens, block.row, block.path),
            tokens,
            adjusted=parts.adjusted,
        )

    return positions, Law(allowed, settings)
