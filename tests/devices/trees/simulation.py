"""Rounds of sampled trees with the draft's and the target's own functions, on toy models.

As `tests.sampling.simulation`: models are tables, every row of a batch is an independent request
from the prompt 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.devices.trees import continuations as tree_continuations
from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.devices.trees.draft_programs import as_log_rates
from ssd_jax.devices.trees.growth import Frontier, TreeProposal
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.sampling import penalties, verification
from ssd_jax.sampling.settings import sampling_of
from ssd_jax.sampling.verification import Outcome, emitted_tokens
from ssd_jax.speculation.fixed_rates import fixed_rates
from tests.sampling import simulation
from tests.sampling.rows import QUICKLY, empty_history
from tests.sampling.simulation import Programs, Scenario

SHAPE = TreeShape(nodes=6, depth=2, ranks=3)


class Round(NamedTuple):
    """What was proposed, its outcome, and the tokens emitted, padded with -1."""

    tree: TreeProposal
    outcome: Outcome
    emitted: np.ndarray


def build(shape: TreeShape, support: int) -> Programs:
    """Fresh programs, traced from what the functions of ssd_jax are when they first run."""
    vocab, drafting = simulation.VOCAB, Drafting(k=shape.depth, support=support, rule="ratio")

    def draft(table, pending, start, history, sampling, log_rates) -> TreeProposal:
        growth = tree_growth.empty(len(start), shape, support)
        limit = jnp.full_like(start, shape.depth)
        growth = growth._replace(start=start, limit=limit)
        nothing = jnp.full((len(start), 1), -1)
        ran = Frontier(pending[:, None], nothing, nothing + 1)
        for depth in range(shape.depth):
            drafted, at_depth = growth.runs.token[:, 1:], jnp.asarray(depth)
            if depth:
                ran = tree_growth.frontier(growth, at_depth, shape)
                begin = (depth - 1) * shape.width
                drafted = drafted.at[:, begin : begin + shape.width].set(ran.tokens)
            row = jnp.repeat(jnp.arange(len(start)), ran.tokens.shape[1])
            path = ran.path.reshape(-1)
            behind = tree_continuations.continuations(
                table[ran.tokens.reshape(-1)],
                sampling_of(sampling, row),
                tree_continuations.places(start, at_depth, ran.tokens.shape[1], shape),
                lambda: penalties.in_flight(history, drafted, row, path),  # noqa: B023
                drafting=drafting,
                count=shape.ranks,
                tokens=vocab,
            )
            growth = tree_growth.add_run(growth, ran, behind, at_depth, log_rates, shape)
        return tree_growth.propose(growth, shape)

    def verify(table, pending, start, history, tree: TreeProposal, sampling):
        before = jnp.concatenate([pending[:, None], tree.proposal.tokens], axis=1)
        law = {"tokens": vocab, "rule": "ratio", "parents": tree.parents}
        outcome = verification.verify(table[before], tree.proposal, sampling, start, history, **law)
        history = verification.commit(history, tree.proposal, outcome, jnp.ones(start.shape, bool))
        return outcome, history, emitted_tokens(tree.proposal, outcome, shape.depth)

    return Programs(
        jax.jit(draft, compiler_options=QUICKLY), jax.jit(verify, compiler_options=QUICKLY)
    )


@functools.cache
def programs(shape: TreeShape, support: int) -> Programs:
    """The programs of the code as it is."""
    return build(shape, support)


def rounds(
    scenario: Scenario, seed: int, using: Programs | None = None, shape: TreeShape = SHAPE
) -> Iterator[Round]:
    """Round after round, without end."""
    using = using or programs(shape, scenario.support)
    batch = simulation.batch(scenario, seed)
    sampling = jax.tree.map(lambda array: array[::4], batch)
    count = len(sampling.request)
    target, draft = (simulation.logits(law) for law in (scenario.target, scenario.draft))
    pending, start = np.zeros(count, np.int32), np.zeros(count, np.int32)
    history = empty_history(count, simulation.VOCAB)
    history.prompt[:, 0] = True
    rates = np.stack([fixed_rates(shape, trees=True)] * count)
    while True:
        tree = using.draft(draft, pending, start, history, sampling, as_log_rates(rates))
        outcome, history, tokens = using.verify(target, pending, start, history, tree, sampling)
        accepted = np.asarray(outcome.accepted)
        accepted_nodes = np.arange(tokens.shape[1]) <= accepted[:, None]
        yield Round(tree, outcome, np.where(accepted_nodes, tokens, -1))
        pending, start = np.asarray(outcome.bonus), start + accepted + 1


def p_value(scenario: Scenario, seed: int, using: Programs | None = None) -> float:
    """How unlikely the first tokens are under the true law."""
    done = itertools.islice(rounds(scenario, seed, using), scenario.count)
    blocks = np.concatenate([round_.emitted for round_ in done], axis=1)
    order = np.argsort(blocks < 0, axis=1, kind="stable")
    text = np.take_along_axis(blocks, order, axis=1)[:, : scenario.count]
    texts = text.reshape(len(scenario.settings), -1, scenario.count)
    values = simulation.p_values(scenario, texts)
    return min(1.0, len(values) * min(values))
