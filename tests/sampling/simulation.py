"""Rounds of speculative decoding with the engine's own functions, on toy models, many rows at once.

The models are tables: row t holds the logits of the token after t. Every row of a batch starts
from the prompt 0 and is an independent request (`request` is the row), so tokens of one run are
independent samples of the emitted law.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels.noise import gumbel_of
from ssd_jax.sampling import drafting, keys, penalties, verification
from ssd_jax.sampling.drafting import Saguaro
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.verification import Outcome
from tests.sampling.evidence import p_value
from tests.sampling.reference import text_law
from tests.sampling.rows import QUICKLY, empty_history, repeated, rows

VOCAB, K = 4, 2
ROWS = 32_768  # of every batch, so that all tests share their programs


class Before(NamedTuple):
    """What the round before did."""

    proposal: Proposal
    outcome: Outcome


class Programs(NamedTuple):
    """The jitted programs of a round."""

    draft: Callable
    verify: Callable


Serve = Callable[[int, Proposal, np.ndarray, Before | None], Proposal]


def as_drafted(_round: int, drafted: Proposal, _pending: np.ndarray, _before: Before | None):
    """Every proposal is verified as it was drafted."""
    return drafted


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A batch of requests and how speculation runs.

    Attributes:
      target, draft: [V, V] probabilities of the token after each token.
      settings: of the requests, which share the rows evenly.
      count: tokens looked at.
      support, rule: of `draw` and `verify`.
      lowered: D of Saguaro sampling with C = 1/2; 0 is none.
      outputs: ids that the draft can say; None is all.
      draft_temperature: of sampled rows, the request's own if None.
      serve: what becomes of a drafted proposal before it is verified, from the round's number, the
        proposal, the pending tokens and the round before.
      length_of: L of every row, from the gaps [B, K] between the two best of log q + the noise that
        draws; None is K.
    """

    target: np.ndarray
    draft: np.ndarray
    settings: Sequence[dict] = field(default_factory=lambda: ({},))
    count: int = 2
    support: int = VOCAB
    rule: str = "ratio"
    lowered: int = 0
    outputs: tuple[int, ...] | None = None
    draft_temperature: float | None = None
    serve: Serve = as_drafted
    length_of: Callable[[jax.Array], jax.Array] | None = None


def build(
    support: int, rule: str, lowered: int = 0, outputs: tuple[int, ...] | None = None
) -> Programs:
    """Fresh programs, traced from what the functions of ssd_jax are when they first run."""
    columns = None if outputs is None else np.array(outputs, np.int32)

    def known(history: penalties.History) -> penalties.History:
        every = jnp.arange(history.output.shape[0])
        return history if columns is None else penalties.history_of(history, every, columns)

    def draft(table, pending, start, history, sampling) -> Proposal:
        def step(carry, index):
            last, seen = carry
            drawn = drafting.draw(
                table[last] if columns is None else table[last][:, columns],
                sampling,
                start,
                index,
                lambda: known(seen),
                tokens=VOCAB,
                support=support,
                rule=rule,
                candidates=lowered,
                saguaro=Saguaro(0.5, jnp.array(lowered)) if lowered else None,
                outputs=columns,
            )
            return (drawn.token, penalties.add_output(seen, drawn.token[:, None])), drawn

        _, drawn = jax.lax.scan(step, (pending, history), jnp.arange(K))
        drawn = jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), drawn)
        # Padded to one shape, so that every support is verified by one program.
        empty = ((0, 0), (0, 0), (0, VOCAB - support))
        ids = jnp.pad(drawn.support, empty, constant_values=-1)
        return Proposal(drawn.token, jnp.full_like(start, K), ids, jnp.pad(drawn.q, empty))

    def verify(table, pending, start, history, proposed, sampling):
        before = jnp.concatenate([pending[:, None], proposed.tokens], axis=1)
        outcome = verification.verify(
            table[before], proposed, sampling, start, history, tokens=VOCAB, rule=rule
        )
        live = jnp.ones(start.shape, bool)
        return outcome, verification.commit(history, proposed, outcome, live)

    return Programs(
        jax.jit(draft, compiler_options=QUICKLY), jax.jit(verify, compiler_options=QUICKLY)
    )


@functools.cache
def programs(
    support: int, rule: str, lowered: int = 0, outputs: tuple[int, ...] | None = None
) -> Programs:
    """The programs of the code as it is."""
    return build(support, rule, lowered, outputs)


def batch(scenario: Scenario, seed: int) -> Sampling:
    """The settings of all rows; row r is request r."""
    of_slots = [{**settings, "seed": (seed, 0)} for settings in scenario.settings]
    many = repeated(rows(*of_slots), ROWS // len(of_slots))
    return many._replace(request=np.arange(len(many.request), dtype=np.uint32))


def rounds(scenario: Scenario, seed: int, using: Programs | None = None) -> Iterator[Before]:
    """Round after round, without end."""
    using = using or programs(scenario.support, scenario.rule, scenario.lowered, scenario.outputs)
    sampling = batch(scenario, seed)
    drafting_at = sampling
    if scenario.draft_temperature is not None:
        sampled = sampling.temperature > 0
        drafting_at = sampling._replace(
            temperature=np.where(sampled, np.float32(scenario.draft_temperature), np.float32(0))
        )
    count = len(sampling.request)
    target, draft = logits(scenario.target), logits(scenario.draft)
    # The prompt is the token 0 at position 0.
    pending, start = np.zeros(count, np.int32), np.zeros(count, np.int32)
    history = empty_history(count, VOCAB)
    history.prompt[:, 0] = True
    before = None
    for index in itertools.count():
        drafted = using.draft(draft, pending, start, history, drafting_at)
        served = scenario.serve(index, drafted, pending, before)
        if scenario.length_of is not None:
            gaps = gaps_of_draws(drafted, drafting_at, start)
            served = served._replace(length=scenario.length_of(gaps).astype(np.int32))
        outcome, history = using.verify(target, pending, start, history, served, sampling)
        before = Before(served, outcome)
        yield before
        pending = np.asarray(outcome.bonus)
        start = start + np.asarray(outcome.accepted) + 1


@jax.jit
def gaps_of_draws(drafted: Proposal, sampling: Sampling, start: jax.Array) -> jax.Array:
    """The gaps [B, K] between the two best of log q + the noise that draws."""
    gaps = []
    for step in range(K):
        at = jnp.full_like(start, step)
        key = keys.derive(sampling.seed, sampling.request, start, at, keys.Purpose.DRAFT)
        noise = gumbel_of(key, drafted.support[:, step])
        best, _ = jax.lax.top_k(jnp.log(drafted.q[:, step]) + noise, 2)
        gaps.append(best[:, 0] - best[:, 1])
    return jnp.stack(gaps, axis=1)


def emitted(done: Before) -> np.ndarray:
    """The tokens that a round emitted, [B, K + 1], padded with -1."""
    accepted = np.asarray(done.outcome.accepted)[:, None]
    tokens = np.pad(np.asarray(done.proposal.tokens), ((0, 0), (0, 1)))
    column = np.arange(K + 1)
    after = np.where(column == accepted, np.asarray(done.outcome.bonus)[:, None], -1)
    return np.where(column < accepted, tokens, after)


def run(scenario: Scenario, seed: int, using: Programs | None = None) -> np.ndarray:
    """The first tokens of every request, [settings, copies, count]."""
    done = itertools.islice(rounds(scenario, seed, using), scenario.count)
    blocks = np.concatenate([emitted(round_) for round_ in done], axis=1)
    # A stable sort moves the padding behind the tokens, which keep their order.
    order = np.argsort(blocks < 0, axis=1, kind="stable")
    text = np.take_along_axis(blocks, order, axis=1)[:, : scenario.count]
    return text.reshape(len(scenario.settings), -1, scenario.count)


def p_values(scenario: Scenario, tokens: np.ndarray) -> list[float]:
    """How unlikely the tokens of a run are under the true law, for each setting."""
    values = []
    for settings, texts in zip(scenario.settings, tokens, strict=True):
        counts = np.zeros((VOCAB,) * scenario.count)
        np.add.at(counts, tuple(texts.T), 1)
        law = text_law(logits(scenario.target), settings, scenario.count)
        values.append(p_value(counts, law))
    return values


def logits(table: np.ndarray) -> np.ndarray:
    """Float32 logits of a table; -inf where a token is impossible.

    They are of both signs, which a repetition penalty treats differently.
    """
    with np.errstate(divide="ignore"):
        return (np.log(np.asarray(table)) + 1.5).astype(np.float32)
