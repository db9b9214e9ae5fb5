"""Sampling settings of each row of a batch, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32


class Sampling(NamedTuple):
    """Settings of B rows."""

    temperature: Float32[Array, "B"]  # 0 is greedy
    top_k: Int32[Array, "B"]  # 0 is off
    top_p: Float32[Array, "B"]  # 1 is off
    min_p: Float32[Array, "B"]  # 0 is off
    repetition_penalty: Float32[Array, "B"]  # 1 is off
    frequency_penalty: Float32[Array, "B"]  # 0 is off
    presence_penalty: Float32[Array, "B"]  # 0 is off
    bias_ids: Int32[Array, "B biased"]  # padded with the vocabulary size, which changes nothing
    bias: Float32[Array, "B biased"]  # added to the logits of these ids
    seed: UInt32[Array, "B 2"]  # low and high word
    request: UInt32[Array, "B"]  # sample index of the caller
    banned: Int32[Array, "B stops"]  # token ids, padded with -1
    ban_before: Int32[Array, "B"]  # `banned` applies to tokens at positions below this
    bad_word_ids: Int32[Array, "B words length"]  # token sequences, padded with -1 in front


@jax.jit  # programs call this many times for each distribution
def sampling_of(sampling: Sampling, rows: Int32[Array, "n"]) -> Sampling:
    """The settings of some rows."""
    return jax.tree.map(lambda array: array[rows], sampling)


def greedy_where_idle(sampling: Sampling, live: Bool[Array, "B"]) -> Sampling:
    """The settings, greedy in rows that are not live: such a row still has the settings of its last
    request, and a program computes for all rows what one of them needs."""
    return sampling._replace(
        temperature=jnp.where(live, sampling.temperature, 0.0),
        repetition_penalty=jnp.where(live, sampling.repetition_penalty, 1.0),
        frequency_penalty=jnp.where(live, sampling.frequency_penalty, 0.0),
        presence_penalty=jnp.where(live, sampling.presence_penalty, 0.0),
        ban_before=jnp.where(live, sampling.ban_before, 0),
        bad_word_ids=jnp.where(live[:, None, None], sampling.bad_word_ids, -1),
    )
