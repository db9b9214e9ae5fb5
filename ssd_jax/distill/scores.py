"""What the target thinks of each position of given texts: its likeliest tokens at temperature 1."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices.opened import open_model
from ssd_jax.distill.rows import batches, room
from ssd_jax.distill.settings import TargetSettings
from ssd_jax.distill.shards import Sample, encode_scores
from ssd_jax.models.sequence import sequence_hidden, sequence_logits

_HEAD_ROWS = 256
"""Positions whose logits are held at once."""


class Scorer:
    """The target with its weights, run over whole texts.

    Args:
      target: which one.
      length: tokens of the longest text.
      top_n: likeliest tokens to keep.
      progress: of loading its weights.

    Raises:
      InputError: a checkpoint that cannot be used.
    """

    def __init__(
        self, target: TargetSettings, *, length: int, top_n: int, progress: Progress | None = None
    ) -> None:
        opened = open_model(target.source, target.dtype)
        self._vocabulary = opened.tokenizer.size
        self._top_n = top_n
        self._rows, self._length = room(length)
        self._parameters = opened.load(progress)
        self._model = opened.model
        self._hidden = jax.jit(self._hidden_of)
        self._top = jax.jit(functools.partial(self._top_of, top_n=top_n))

    def scores(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest ids [rows, N] int32 and their probabilities [rows, N] float32, likeliest first.

        A row is a learnt position; those of a sample follow each other, as samples do. Padding ids
        of the model have no part in the distribution.
        """
        ends = np.cumsum([0, *(len(sample.learnt) for sample in samples)])
        ids = np.zeros((ends[-1], self._top_n), np.int32)
        probs = np.zeros((ends[-1], self._top_n), np.float32)
        for batch in batches([len(s.tokens) for s in samples], self._rows, self._length):
            tokens, positions, segments = batch.arrays([s.tokens for s in samples])
            hidden = self._hidden(self._parameters, tokens, positions, segments)
            flat = np.concatenate([place + np.array(samples[i].learnt) for i, place in batch.texts])
            to = np.concatenate([np.arange(ends[i], ends[i + 1]) for i, _ in batch.texts])
            for begin in range(0, len(flat), _HEAD_ROWS):
                part = slice(begin, begin + _HEAD_ROWS)
                rows = np.zeros(_HEAD_ROWS, np.int32)
                rows[: len(flat[part])] = flat[part]
                found = jax.device_get(self._top(self._parameters, hidden, rows))
                ids[to[part]], probs[to[part]] = (one[: len(flat[part])] for one in found)
        return ids, probs

    def encoded(self, samples: Sequence[Sample]) -> bytes:
        """The scores of a shard, as its file."""
        return encode_scores(*self.scores(samples), self._vocabulary)

    def _hidden_of(self, parameters, tokens, positions, segments) -> jax.Array:
        model = self._model.module(parameters)
        hidden = sequence_hidden(model, tokens, positions, segments)
        return hidden.reshape(tokens.size, -1)

    def _top_of(self, parameters, hidden, rows, *, top_n: int) -> tuple[jax.Array, jax.Array]:
        logits = sequence_logits(self._model.module(parameters), hidden[rows])
        logits = logits[:, : self._vocabulary]
        likeliest, ids = jax.lax.top_k(logits, top_n)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return ids, jnp.exp(likeliest - total)
