"""Sampling settings of each row of a batch, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Sampling(NamedTuple):
    """Settings of B rows.

    Attributes:
      temperature: [B] float32; 0 is greedy.
      top_k: [B] int32; 0 is off.
      top_p, min_p: [B] float32; 1 and 0 are off.
      repetition_penalty: [B] float32; 1 is off.
      frequency_penalty, presence_penalty: [B] float32; 0 is off.
      bias_ids, bias: [B, S] int32 and float32; added to the logits of these ids. Ids are padded
        with the vocabulary size, which changes nothing.
      seed: [B, 2] uint32, low and high word.
      request: [B] uint32, sample index of the caller.
      banned: [B, S] int32 token ids, padded with -1.
      ban_before: [B] int32; `banned` applies to tokens at positions below this.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    seed: jax.Array
    request: jax.Array
    banned: jax.Array
    ban_before: jax.Array


def sampling_of(sampling: Sampling, rows: jax.Array) -> Sampling:
    """The settings of rows [n] of [B]."""
    return jax.tree.map(lambda array: array[rows], sampling)
