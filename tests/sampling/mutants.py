"""Faults put into the speculation code on purpose, and the experiment that catches each.

A mutant is an edit of the source of a function of `ssd_jax.sampling` (the old text must occur
exactly once, so that a refactoring cannot disarm it), or, where the fault is one of the caller,
another `serve`. Its experiment runs the code under test on a toy built to expose the fault, and
gives a p-value under the true law.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels import noise
from ssd_jax.kernels.verify import xla
from ssd_jax.sampling import drafting, keys, probs, proposal, verification
from ssd_jax.sampling.judgement import block, ratio, rejection
from ssd_jax.sampling.proposal import Proposal
from tests.sampling import simulation
from tests.sampling.edits import Edit, edited
from tests.sampling.rows import words
from tests.sampling.simulation import Before, Programs, Scenario, Serve


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A scenario; `zero_bits` forces every random bit to 0, so that u is the least it can be."""

    scenario: Scenario
    zero_bits: bool = False


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: edits, or another `serve` or `length_of` in the experiment's scenario."""

    name: str
    experiment: str
    edits: Sequence[Edit] = ()
    serve: Serve | None = None
    length_of: Callable[[jax.Array], jax.Array] | None = None


IID = (0.5, 0.5, 0.0, 0.0)
TARGET = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4, [0.4, 0.4, 0.1, 0.1]])
DRAFT = np.array([[0.1, 0.1, 0.2, 0.6], [0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25] * 4])


def half_late(_round: int, drafted: Proposal, pending: np.ndarray, _before: Before | None):
    """Every second row proposes the successors of its pending token; the q there is of others."""
    rows = jnp.arange(len(pending)) % 2 == 0
    guess = (pending[:, None] + 1 + np.arange(simulation.K)) % simulation.VOCAB
    tokens = jnp.where(rows[:, None], guess, drafted.tokens)
    return proposal.as_point_mass_where(drafted._replace(tokens=tokens), rows)


def shorter_by_round(round_: int, drafted: Proposal, _pending: np.ndarray, _before: Before | None):
    """L = 1 in the first round, K after it: known before anything is drafted."""
    return drafted._replace(length=jnp.full_like(drafted.length, 1 if round_ == 0 else 2))


def shorter_by_row(_round: int, drafted: Proposal, *_: object) -> Proposal:
    """L = 1 in every second row, K in the others; q of what is left out is still there."""
    return drafted._replace(length=1 + jnp.arange(len(drafted.length), dtype=jnp.int32) % 2)


def shorter_by_content(_round: int, drafted: Proposal, *_: object) -> Proposal:
    """L is 1 where the second token turned out to be a 1."""
    length = jnp.where(drafted.tokens[:, 1] == 1, 1, 2)
    return drafted._replace(length=length.astype(jnp.int32))


def one_entry_cache(_round: int, drafted: Proposal, _pending: np.ndarray, before: Before | None):
    """After 'nothing accepted', serves a proposal only if the token dropped in second place was 0.

    SSD does so when that token decides which outcome its one branch is for.
    """
    if before is None:
        return drafted
    nothing = before.outcome.accepted == 0
    missed = (before.proposal.length > 0) & nothing & (before.proposal.tokens[:, 1] != 0)
    return drafted._replace(length=jnp.where(missed, 0, drafted.length))


def after_a_sure_token(gaps: jax.Array) -> jax.Array:
    """A second token follows a first one, which is proposed in any case, that was drawn clearly."""
    return 1 + (gaps[:, 0] > 1)


def until_an_unsure_token(gaps: jax.Array) -> jax.Array:
    """A second token is proposed where it was itself drawn clearly."""
    return 1 + (gaps[:, 1] > 1)


EXPERIMENTS = {
    "another temperature": Experiment(
        scenario=Scenario(target=TARGET, draft=DRAFT, draft_temperature=0.5)
    ),
    "two of four ids kept": Experiment(scenario=Scenario(target=TARGET, draft=DRAFT, support=2)),
    "three of four ids known": Experiment(
        scenario=Scenario(target=TARGET, draft=DRAFT, support=3, outputs=(0, 2, 3))
    ),
    "top-k on both sides": Experiment(
        scenario=Scenario(
            target=np.array([(0.4, 0.3, 0.2, 0.1)] * 4),
            draft=np.array([(0.45, 0.1, 0.25, 0.2)] * 4),
            settings=({"top_k": 2},),
        )
    ),
    "a residual of two tokens": Experiment(
        scenario=Scenario(
            target=np.array([(0.45, 0.45, 0.05, 0.05)] * 4),
            draft=np.array([(0.4, 0.02, 0.05, 0.53)] * 4),
        )
    ),
    "u = 0": Experiment(
        scenario=Scenario(
            target=np.array([[0.0, 0.5, 0.5, 0.0]] * 4),
            draft=np.array([[0.7, 0.1, 0.1, 0.1]] * 4),
        ),
        zero_bits=True,
    ),
    "one-entry cache": Experiment(
        scenario=Scenario(
            target=np.array([IID] * 4),
            draft=np.array([(0.8, 0.2, 0.0, 0.0)] * 4),
            serve=one_entry_cache,
        )
    ),
    "L below K": Experiment(scenario=Scenario(target=TARGET, draft=DRAFT, serve=shorter_by_round)),
    "penalties": Experiment(
        scenario=Scenario(target=TARGET, draft=DRAFT, settings=({"presence_penalty": 1.0},))
    ),
    "bad words": Experiment(
        scenario=Scenario(
            target=TARGET,
            draft=DRAFT,
            settings=({"bad_word_ids": words((1, 2), (0, 3), (2, 1, 0))},),
            count=3,
        )
    ),
    "L by the gap of a token before": Experiment(
        scenario=Scenario(
            target=np.array([(0.81, 0.05, 0.08, 0.06)] * 4),
            draft=np.array([(0.81, 0.06, 0.08, 0.05)] * 4),
            length_of=after_a_sure_token,
        )
    ),
    "late q": Experiment(scenario=Scenario(target=TARGET, draft=DRAFT, serve=half_late)),
    "Saguaro sampling": Experiment(
        scenario=Scenario(
            target=np.array([(0.02, 0.27, 0.14, 0.57)] * 4),
            draft=np.array([(0.53, 0.24, 0.15, 0.08)] * 4),
            lowered=1,
        )
    ),
    "block verification": Experiment(
        scenario=Scenario(target=TARGET, draft=DRAFT, rule="block", draft_temperature=0.5)
    ),
    "block verification, a residual of two tokens": Experiment(
        scenario=Scenario(
            target=np.array([(0.5, 0.5, 0.0, 0.0)] * 4),
            draft=np.array([(0.02, 0.98, 0.0, 0.0), (0.3, 0.02, 0.34, 0.34)] * 2),
            rule="block",
        )
    ),
    "block verification, L below K in half of the rows": Experiment(
        scenario=Scenario(target=TARGET, draft=DRAFT, rule="block", serve=shorter_by_row)
    ),
    "greedy beside sampled": Experiment(
        scenario=Scenario(target=TARGET, draft=DRAFT, settings=({"temperature": 0.0}, {}))
    ),
}

MUTANTS = (
    Mutant(
        name="wrong q",
        experiment="another temperature",
        edits=[
            # The draft's temperature is applied to the draw, and forgotten in what is kept.
            Edit(
                drafting,
                "draw",
                "scores = jnp.log(q) + noise",
                "heat = sampling.temperature[:, None]\n"
                "        q = jnp.take_along_axis(jax.nn.softmax(allowed), ids, axis=-1)\n"
                "        scores = jnp.log(q) / heat + noise",
            ),
        ],
    ),
    Mutant(
        name="q before truncation (to its support)",
        experiment="two of four ids kept",
        edits=[
            Edit(probs, "likeliest_probs", "return p / row_sum(p), ids", "return p, ids"),
        ],
    ),
    Mutant(
        name="q before truncation (by top-k)",
        experiment="top-k on both sides",
        edits=[
            # Drawn from the truncated law; what is kept is the law before.
            Edit(
                drafting,
                "draw",
                "jnp.where(is_sampled[:, None], q, greedy.q)",
                "jnp.where(is_sampled[:, None], "
                "jnp.take_along_axis(jax.nn.softmax(allowed), ids, axis=-1), greedy.q)",
            ),
        ],
    ),
    Mutant(
        name="wrong q (columns of a reduced vocabulary taken for ids)",
        experiment="three of four ids known",
        edits=[
            Edit(
                drafting,
                "draw",
                "jnp.where(q > 0, ids, -1)",
                "jnp.where(q > 0, jnp.searchsorted(jnp.asarray(outputs), ids), -1)",
            ),
        ],
    ),
    Mutant(
        name="dropped residual",
        experiment="two of four ids kept",
        edits=[
            Edit(
                xla,
                "_weights",
                "jnp.where(residual.applies[:, None], jnp.maximum(scaled - q, 0.0), p)",
                "p",
            ),
        ],
    ),
    Mutant(
        name="u <= p/q with u = 0",
        experiment="u = 0",
        edits=[
            Edit(
                ratio,
                "judge",
                "u * q_token < p_token",
                "u * q_token <= p_token",
            ),
            Edit(noise, "unit", "(low.astype(jnp.float32) + 0.5)", "low.astype(jnp.float32)"),
        ],
    ),
    Mutant(
        name="a draw reused (the draft's for the bonus)",
        experiment="a residual of two tokens",
        edits=[
            Edit(
                drafting, "draw", "(start, step, Purpose.DRAFT)", "(start, position, Purpose.BONUS)"
            ),
        ],
    ),
    Mutant(
        name="a draw reused (the acceptance's for the bonus)",
        experiment="two of four ids kept",
        edits=[
            Edit(rejection, "draw_bonus", "position, Purpose.BONUS", "position, Purpose.ACCEPT"),
        ],
    ),
    Mutant(
        name="start dropped from the key",
        experiment="one-entry cache",
        edits=[
            Edit(
                drafting,
                "draw",
                "(start, step, Purpose.DRAFT)",
                "(jnp.zeros_like(start), position, Purpose.DRAFT)",
            ),
        ],
    ),
    Mutant(
        name="L chosen by looking at a dropped token",
        experiment="L below K",
        serve=shorter_by_content,
    ),
    Mutant(
        name="L chosen by the gap of a token that it drops",
        experiment="L by the gap of a token before",
        length_of=until_an_unsure_token,
    ),
    Mutant(
        name="penalties blind to in-flight tokens",
        experiment="penalties",
        edits=[
            Edit(
                verification,
                "_positions",
                "in_flight(history, proposal.tokens, block.row, block.path)",
                "in_flight(history, proposal.tokens, block.row, jnp.zeros_like(block.path))",
            ),
        ],
    ),
    Mutant(
        name="bad words blind to in-flight tokens",
        experiment="bad words",
        edits=[
            Edit(
                verification,
                "_positions",
                "in_flight(history, proposal.tokens, block.row, block.path)",
                "in_flight(history, proposal.tokens, block.row, jnp.zeros_like(block.path))",
            ),
        ],
    ),
    Mutant(
        name="bad words that follow a rejected token",
        experiment="bad words",
        edits=[
            Edit(
                verification,
                "commit",
                "topology.on_path(outcome.path, ",
                "topology.on_path(2 * outcome.path + 1, ",
            ),
        ],
    ),
    Mutant(
        name="a point-mass row verified with a stale q",
        experiment="late q",
        edits=[
            Edit(
                proposal,
                "as_point_mass_where",
                "q=jnp.where(selected, mass, proposal.q)",
                "q=proposal.q",
            ),
        ],
    ),
    Mutant(
        name="Saguaro set chosen by the bonus noise",
        experiment="Saguaro sampling",
        edits=[
            # The tokens that the verification would draw, and not the likeliest.
            Edit(
                drafting,
                "draw",
                "lower(q, ids, likeliest, ",
                "lower(q, ids, jnp.argsort(-(allowed + keys.gumbel(keys.derive(sampling.seed, "
                "sampling.request, start, position, Purpose.BONUS), allowed.shape[1])), axis=-1)"
                "[:, :candidates], ",
            ),
        ],
    ),
    Mutant(
        name="Saguaro D chosen by the gap of the noise that draws",
        experiment="Saguaro sampling",
        edits=[
            Edit(
                drafting,
                "draw",
                "lower(q, ids, likeliest, saguaro.lowered, ",
                "lower(q, ids, likeliest, saguaro.lowered * ((lambda best: "
                "best[:, 0] - best[:, 1] < 1)(top_k(jnp.log(q) + gumbel_of(keys.derive("
                "sampling.seed, sampling.request, start, step, Purpose.DRAFT), ids), 2)[0])), ",
            ),
        ],
    ),
    Mutant(
        name="Saguaro set forgotten in what is kept",
        experiment="Saguaro sampling",
        edits=[
            Edit(
                drafting,
                "draw",
                "jnp.where(is_sampled[:, None], q, greedy.q)",
                "jnp.where(is_sampled[:, None], q_before, greedy.q)",
            ),
        ],
    ),
    Mutant(
        name="block verification by the uncapped product",
        experiment="block verification",
        edits=[
            Edit(
                block, "_survival", "jnp.minimum(survival[-1] * p / q, 1.0)", "survival[-1] * p / q"
            )
        ],
    ),
    Mutant(
        name="block verification of an early end as if more were proposed",
        experiment="block verification, L below K in half of the rows",
        edits=[Edit(block, "judge", "count == proposal.length[:, None]", "count == c.shape[1]")],
    ),
    Mutant(
        name="block verification with a residual of p for c p",
        experiment="block verification, a residual of two tokens",
        edits=[Edit(block, "judge", "accepted, scale)", "accepted, None)")],
    ),
    Mutant(
        name="logits at a sentinel temperature",
        experiment="greedy beside sampled",
        edits=[
            Edit(
                xla,
                "decided",
                "max_and_argmax(law.allowed(block))",
                "max_and_argmax(law.allowed(block) / jnp.where(is_sampled[block.row], "
                "law.settings(block).temperature, -1.0)[:, None])",
            ),
        ],
    ),
)


@contextlib.contextmanager
def experiment(name: str, mutant: Mutant | None = None) -> Iterator[Callable[[int], float]]:
    """A function from a seed to the p-value of an experiment, with or without a fault."""
    chosen = EXPERIMENTS[name]
    scenario = chosen.scenario
    if mutant and mutant.serve:
        scenario = replace(scenario, serve=mutant.serve)
    if mutant and mutant.length_of:
        scenario = replace(scenario, length_of=mutant.length_of)
    make = simulation.build if mutant or chosen.zero_bits else simulation.programs
    using = make(scenario.support, scenario.rule, scenario.lowered, scenario.outputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(edited(mutant.edits if mutant else ()))
        if chosen.zero_bits:
            for module in (keys, noise):
                stack.enter_context(mock.patch.object(module, "threefry", _no_bits))
        yield lambda seed: _evidence(chosen, scenario, seed, using)


def _evidence(chosen: Experiment, scenario: Scenario, seed: int, using: Programs) -> float:
    tokens = simulation.run(scenario, seed, using)
    if chosen.zero_bits:  # then nothing is random: only impossible tokens tell
        possible = np.asarray(scenario.target)[0] > 0
        return float(possible[tokens].all())
    values = simulation.p_values(scenario, tokens)
    return min(1.0, len(values) * min(values))


def _no_bits(_key: tuple, counter: tuple) -> tuple:
    zero = jnp.zeros(jnp.broadcast_shapes(_key[0].shape, counter[0].shape), jnp.uint32)
    return zero, zero
