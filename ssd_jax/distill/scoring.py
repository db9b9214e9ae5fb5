"""What target and draft make of given texts, position by position: teacher forcing.

Whole texts run in the rows of forwards that are all of one size; the head is run over the positions
that are asked for alone, a block of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.devices.opened import open_model
from ssd_jax.distill.settings import TargetSettings
from ssd_jax.distill.shards import Sample, encode_scores
from ssd_jax.distill.training.data import PackedTexts, Piece, columns_of, first_fit
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.sequence import sequence_hidden, sequence_logits

_TOKENS = 4096
"""Of a forward."""

_STEP = 128
"""Rows are a multiple of so many tokens long."""

_HEAD_ROWS = 256
"""Positions whose logits are held at once."""


class TextRunner:
    """Models with their weights, run over whole texts.

    Args:
      models: each with its parameters.
      compare: (logits [rows, columns] of each model, the next tokens [rows] int32) -> arrays whose
        leading axis is the rows.
      longest: tokens of the longest text.
    """

    def __init__(
        self,
        models: Sequence[tuple[FunctionalModel, Parameters]],
        compare: Callable[..., Sequence[jax.Array]],
        *,
        longest: int,
    ) -> None:
        self._models = [model for model, _ in models]
        self._parameters = [parameters for _, parameters in models]
        self._length = -(-longest // _STEP) * _STEP
        self._count, self._compare = max(1, _TOKENS // self._length), compare
        self._body, self._head = jax.jit(self._hidden), jax.jit(self._compared)

    def run(self, samples: Sequence[Sample], progress: Progress | None = None) -> list[np.ndarray]:
        """What `compare` returns of the learnt positions, one sample after the other.

        Args:
          samples: without scores.
          progress: called with (positions done, positions).
        """
        rows = first_fit([Piece(i, 0, len(s.tokens)) for i, s in enumerate(samples)], self._length)
        packed = PackedTexts(samples, rows, self._length, width=0)
        ends = np.cumsum([0, *(len(sample.learnt) for sample in samples)])
        found: list[np.ndarray] = []
        done = 0
        for first in range(0, len(rows), self._count):
            here = range(first, first + self._count)
            batch = packed.batch(row if row < len(rows) else -1 for row in here)
            hidden = self._body(self._parameters, batch.tokens, batch.positions, batch.segments)
            flat, following = np.flatnonzero(batch.counted), batch.following[batch.counted]
            own = [piece.text for row in rows[first : here.stop] for piece in row]
            to = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in own])
            for begin in range(0, len(flat), _HEAD_ROWS):
                part = slice(begin, begin + _HEAD_ROWS)
                count = len(flat[part])
                places, tokens = np.zeros((2, _HEAD_ROWS), np.int32)
                places[:count], tokens[:count] = flat[part], following[part]
                values = jax.device_get(self._head(self._parameters, hidden, places, tokens))
                found = found or [np.zeros((ends[-1], *x.shape[1:]), x.dtype) for x in values]
                for array, value in zip(found, values, strict=True):
                    array[to[part]] = value[:count]
            done += len(flat)
            if progress is not None:
                progress(done, int(ends[-1]))
        return found

    def _hidden(self, parameters, tokens, positions, segments) -> list[jax.Array]:
        runs = zip(self._models, parameters, strict=True)
        found = [sequence_hidden(m.module(own), tokens, positions, segments) for m, own in runs]
        return [each.reshape(tokens.size, -1) for each in found]

    def _compared(self, parameters, hidden, rows, following) -> Sequence[jax.Array]:
        runs = zip(self._models, parameters, hidden, strict=True)
        logits = [sequence_logits(m.module(own), each[rows]) for m, own, each in runs]
        return self._compare(logits, following)


class TargetScorer:
    """The target with its weights: its likeliest tokens at temperature 1.

    Args:
      length: tokens of the longest text.
      progress: of loading its weights.

    Raises:
      InputError: a checkpoint that cannot be used.
    """

    def __init__(
        self, target: TargetSettings, *, length: int, top_n: int, progress: Progress | None = None
    ) -> None:
        opened = open_model(target.source, target.dtype)
        self._vocabulary = opened.tokenizer.size

        def top(logits: list[jax.Array], _following: jax.Array) -> tuple[jax.Array, jax.Array]:
            own = logits[0][:, : opened.tokenizer.size]
            likeliest, ids = jax.lax.top_k(own, top_n)
            return ids, jnp.exp(likeliest - jax.nn.logsumexp(own, axis=-1, keepdims=True))

        self._runner = TextRunner([(opened.model, opened.load(progress))], top, longest=length)

    def scores(self, samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest ids [rows, N] int32 and their probabilities [rows, N] float32, likeliest first.

        A row is a learnt position; those of a sample follow each other, as samples do. Padding ids
        of the model have no part in the distribution.
        """
        ids, probs = self._runner.run(samples)
        return ids, probs

    def encoded(self, samples: Sequence[Sample]) -> bytes:
        """The scores of a shard, as its file."""
        return encode_scores(*self.scores(samples), self._vocabulary)


class Judged(NamedTuple):
    """Of each token of a completion [m], as p and q at temperature 1 have it.

    Attributes:
      rank: int32, its place in the draft's law, 0 being the likeliest (of equal ones the lowest id
        goes first); the number of ids that the draft can propose, if it is none of them.
      kept: float32, min(1, q / p): how often it was proposed and accepted, given that it came.
      overlap: float32, sum over all ids of min(p, q): how often any proposal is accepted there.
    """

    rank: Any
    kept: Any
    overlap: Any


def judge(
    target: tuple[FunctionalModel, Parameters],
    draft: tuple[FunctionalModel, Parameters],
    texts: Sequence[Sample],
    *,
    tokens: int,
    longest: int,
    progress: Progress | None = None,
) -> list[Judged]:
    """What a draft would have made of texts; one of each, in order.

    Args:
      texts: with a prompt and a completion of at least one token each.
      tokens: ids of the tokenizer; columns of a head beyond them are padding.
      longest: tokens of the longest text that the programs are for.
    """
    ids = draft[0].output_ids

    def compare(logits: list[jax.Array], following: jax.Array) -> Judged:
        return _judged(logits[0][:, :tokens], logits[1], ids, following)

    found = TextRunner([target, draft], compare, longest=longest).run(texts, progress)
    ends = np.cumsum([len(text.learnt) for text in texts])[:-1]
    return [Judged(*one) for one in zip(*(np.split(x, ends) for x in found), strict=True)]


def _judged(
    theirs: jax.Array, own: jax.Array, ids: np.ndarray | None, following: jax.Array
) -> Judged:
    """Of the target's logits, the draft's, whose columns are `ids`, and tokens that came."""
    p = jax.nn.softmax(theirs)
    if ids is None:
        own = own[:, : p.shape[1]]
        column, shared = following, p
    else:
        column = jnp.asarray(columns_of(ids, p.shape[1]))[following]
        shared = p[:, ids]
    q = jax.nn.softmax(own)
    size = own.shape[1]
    known = column < size
    at = jnp.minimum(column, size - 1)[:, None]
    logit = jnp.take_along_axis(own, at, axis=1)
    before = (own > logit) | ((own == logit) & (jnp.arange(size) < at))
    p_next = jnp.take_along_axis(p, following[:, None], axis=1)[:, 0]
    q_next = jnp.where(known, jnp.take_along_axis(q, at, axis=1)[:, 0], 0.0)
    return Judged(
        rank=jnp.where(known, jnp.sum(before, axis=1), size).astype(jnp.int32),
        kept=jnp.where(q_next < p_next, q_next / p_next, 1.0),
        overlap=jnp.sum(jnp.minimum(shared, q), axis=1),
    )
