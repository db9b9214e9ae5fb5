"""Penalties and bias: how a request's history, its prompt and output so far, changes logits.

Two integer facts a token, whether it is in the prompt and how often it was generated, are enough
for every penalty; bad words also need the last tokens of the output in order. Tokens in flight are
first added as integers, then each penalty is applied once, so that speculation cannot change a
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.sampling.outputs import Outputs, columns_of
from ssd_jax.sampling.params import MAX_BAD_WORD_TOKENS
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.topology import on_path
from ssd_jax.sampling.variants import when


class History(NamedTuple):
    """Tokens of each row, by id."""

    prompt: Bool[Array, "B V"]  # whether the token is in the prompt
    output: Int32[Array, "B V"]  # times it was committed to the output, counting the pending token
    recent: Int32[Array, "B R"]  # the last tokens of the output, padded with -1 in front


def empty(rows: int, vocab: int) -> History:
    """Histories without tokens."""
    return History(
        jnp.zeros((rows, vocab), bool),
        jnp.zeros((rows, vocab), jnp.int32),
        jnp.full((rows, MAX_BAD_WORD_TOKENS - 1), -1, jnp.int32),
    )


def add_prompt(
    history: History, row: Int32[Array, ""], tokens: Int32[Array, "n"], first: Bool[Array, ""]
) -> History:
    """Adds prompt tokens to a row, after emptying it when `first`; ids >= V are ignored."""
    keep = jnp.logical_not(first)
    rows = jnp.full_like(tokens, row)
    recent = history.recent
    return History(
        history.prompt.at[row]
        .set(history.prompt[row] & keep)
        .at[rows, tokens]
        .set(True, mode="drop"),
        history.output.at[row].set(history.output[row] * keep),
        recent.at[row].set(jnp.where(first, -1, recent[row])),
    )


def add_output(
    history: History, tokens: Int32[jax.Array | np.ndarray, "B n"], outputs: Outputs = None
) -> History:
    """Adds committed tokens, in order; negative ids are none.

    Ids of V and more, or that have no column, are not counted.
    """
    recent = _append_recent(history.recent, jnp.asarray(tokens))
    if outputs is not None:
        tokens = columns_of(outputs, jnp.asarray(tokens))
    vocab = history.output.shape[1]
    rows = jnp.arange(tokens.shape[0])[:, None]
    ids = jnp.where(tokens < 0, vocab, tokens)
    output = history.output.at[rows, ids].add(1, mode="drop")
    return history._replace(output=output, recent=recent)


def recall_output(history: History, row: Int32[Array, ""], tokens: Int32[Array, "n"]) -> History:
    """Adds output tokens that one row had before; negative ids are none."""
    ids = jnp.where(tokens < 0, history.output.shape[1], tokens)
    (recent,) = _append_recent(history.recent[row][None], tokens[None])
    return history._replace(
        output=history.output.at[row, ids].add(1, mode="drop"),
        recent=history.recent.at[row].set(recent),
    )


def _append_recent(recent: Int32[Array, "B R"], tokens: Int32[Array, "B n"]) -> Int32[Array, "B R"]:
    """The last R tokens of both that are not negative, in order, padded with -1 in front."""
    sequence, length = jnp.concatenate([recent, tokens], axis=1), recent.shape[1]
    is_token = sequence >= 0
    slot = length - jnp.cumsum(is_token[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
    at_slot = is_token[:, :, None] & (slot[:, :, None] == jnp.arange(length))
    return jnp.max(jnp.where(at_slot, sequence[:, :, None], -1), axis=1)


def history_of(history: History, row: Int32[Array, "n"], outputs: Outputs = None) -> History:
    """The history of some rows; with `outputs`, only for these tokens, a column each."""
    if outputs is None:
        return jax.tree.map(lambda array: array[row], history)
    index = (row[:, None], jnp.asarray(outputs)[None])
    return History(history.prompt[index], history.output[index], history.recent[row])


def in_flight(
    history: History,
    proposed: Int32[jax.Array | np.ndarray, "B K"],
    row: Int32[Array, "n"],
    path: Int32[Array, "n"],
    outputs: Outputs = None,
) -> History:
    """The history [n, V] that positions of a verification see; with `outputs` [n, N].

    Args:
      history: committed tokens, including the pending one.
      proposed: tokens in flight.
      row: the sequence of each position.
      path: of its proposed tokens that come before the position; see `topology`.
    """
    precedes = on_path(path, proposed.shape[1])
    committed = history_of(history, row, outputs)
    return add_output(committed, jnp.where(precedes, jnp.asarray(proposed)[row], -1), outputs)


GetHistory = Callable[[], History]
"""Returns the history of some rows, [n, N] for the columns of a reduced vocabulary; it is a copy,
made only where it is needed."""


def penalise(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    get_history: GetHistory,
    outputs: Outputs = None,
    adjusted: bool | None = None,
) -> Float32[Array, "B V"]:
    """Applies repetition, frequency and presence penalty, then logit bias.

    Repetition divides a positive logit by the penalty and multiplies a negative one, for ids in
    prompt or output; frequency subtracts its value for each time an id was generated, presence
    once if it was. With `outputs`, logits and history have columns for these ids only. `adjusted`
    is the field of `Parts`.
    """

    def apply(logits: jax.Array) -> jax.Array:
        history = get_history()
        generated = history.output > 0
        repetition = sampling.repetition_penalty[:, None]
        penalised = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(generated | history.prompt, penalised, logits)
        logits = logits - sampling.frequency_penalty[:, None] * history.output
        return logits - sampling.presence_penalty[:, None] * generated

    active = (
        (sampling.repetition_penalty != 1)
        | (sampling.frequency_penalty != 0)
        | (sampling.presence_penalty != 0)
    )
    logits = when(
        adjusted,
        jnp.any(active),
        lambda logits: jnp.where(active[:, None], apply(logits), logits),
        lambda logits: logits,
        logits,
    )
    rows = jnp.arange(logits.shape[0])[:, None]

    def bias(logits: jax.Array) -> jax.Array:
        ids = sampling.bias_ids
        columns = ids if outputs is None else columns_of(outputs, ids)
        return logits.at[rows, columns].add(sampling.bias, mode="drop")

    vocab_end = logits.shape[1] if outputs is None else jnp.asarray(outputs)[-1] + 1
    biased = jnp.any(sampling.bias_ids < vocab_end)
    return when(adjusted, biased, bias, lambda logits: logits, logits)
