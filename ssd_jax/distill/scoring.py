"""What target and draft make of given texts, position by position: whole texts in rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.progress import Progress
from ssd_jax.distill.settings import TargetSettings
from ssd_jax.distill.shards import Sample, encode_scores
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.sequence import sequence_hidden, sequence_logits
from ssd_jax.opened import open_model

_TOKENS = 4096
"""Of a forward."""

_STEP = 128
"""Rows are a multiple of so many tokens long."""


def room(longest: int) -> tuple[int, int]:
    """Rows of a forward, and tokens of a row, for texts of at most so many tokens."""
    length = -(-longest // _STEP) * _STEP
    return max(1, _TOKENS // length), length


def batches(sizes: Sequence[int], rows: int, length: int) -> Iterator[TextRows]:
    """Texts of these sizes in rows, each in the first of a batch's rows that has room."""
    batch = TextRows(rows, length)
    for index, size in enumerate(sizes):
        if not batch.put(index, size):
            yield batch
            batch = TextRows(rows, length)
            batch.put(index, size)
    if batch.texts:
        yield batch


class TextRows:
    """Rows of texts.

    Attributes:
      texts: (index of the text, its first token's place in the flattened batch).
    """

    def __init__(self, rows: int, length: int) -> None:
        self.texts: list[tuple[int, int]] = []
        self._free = [length] * rows
        self._length = length

    def put(self, index: int, size: int) -> bool:
        """Takes a text, if there is room."""
        for row, free in enumerate(self._free):
            if size <= free:
                self.texts.append((index, (row + 1) * self._length - free))
                self._free[row] -= size
                return True
        return False

    def arrays(self, texts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, positions and segments, each [rows, length] int32; segment 0 is padding."""
        tokens, positions, segments = np.zeros((3, len(self._free) * self._length), np.int32)
        for segment, (index, place) in enumerate(self.texts, start=1):
            own = slice(place, place + len(texts[index]))
            tokens[own] = texts[index]
            positions[own] = np.arange(len(texts[index]))
            segments[own] = segment
        shape = (len(self._free), self._length)
        return tokens.reshape(shape), positions.reshape(shape), segments.reshape(shape)


_HEAD_ROWS = 256
"""Positions whose logits are held at once."""


class TargetScorer:
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


_HEAD_ROWS = 256
"""Positions whose logits are held at once."""


class GivenText(NamedTuple):
    """tokens [n] int32, of which `prompt` were given."""

    tokens: np.ndarray
    prompt: int


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


class Judge:
    """Target and draft with their weights, run over whole texts.

    Args:
      target, draft: models and their parameters.
      tokens: ids of the tokenizer; columns of a head beyond them are padding.
      longest: tokens of the longest text.
    """

    def __init__(
        self,
        target: tuple[FunctionalModel, Parameters],
        draft: tuple[FunctionalModel, Parameters],
        *,
        tokens: int,
        longest: int,
    ) -> None:
        self._models = tuple(model for model, _ in (target, draft))
        self._parameters = tuple(parameters for _, parameters in (target, draft))
        self._tokens = tokens
        self._rows, self._length = room(longest)
        self._hidden = jax.jit(self._hidden_of)
        self._compare = jax.jit(self._comparison)

    def judge(
        self, texts: Sequence[GivenText], progress: Callable[[int, int], None] | None = None
    ) -> list[Judged]:
        """One of each text, in order.

        Args:
          texts: with a completion of at least one token each.
          progress: called with (positions done, positions).
        """
        sizes = [len(text.tokens) - text.prompt for text in texts]
        ends = np.cumsum([0, *sizes])
        found = Judged(
            np.zeros(ends[-1], np.int32), *(np.zeros(ends[-1], np.float32) for _ in range(2))
        )
        done = 0
        whole = [text.tokens for text in texts]
        for batch in batches([len(tokens) for tokens in whole], self._rows, self._length):
            arrays = batch.arrays(whole)
            hidden = self._hidden(self._parameters, *arrays)
            places = [
                (i, place + np.arange(texts[i].prompt, len(whole[i]))) for i, place in batch.texts
            ]
            flat = np.concatenate([own for _, own in places])  # of the tokens that are judged
            to = np.concatenate([np.arange(ends[i], ends[i + 1]) for i, _ in places])
            following = arrays[0].reshape(-1)[flat]
            for begin in range(0, len(flat), _HEAD_ROWS):
                part = slice(begin, begin + _HEAD_ROWS)
                rows, tokens = np.zeros((2, _HEAD_ROWS), np.int32)
                rows[: len(flat[part])] = flat[part] - 1
                tokens[: len(flat[part])] = following[part]
                judged = jax.device_get(self._compare(self._parameters, hidden, rows, tokens))
                for array, values in zip(found, judged, strict=True):
                    array[to[part]] = values[: len(flat[part])]
            done += len(flat)
            if progress is not None:
                progress(done, int(ends[-1]))
        parts = [np.split(array, ends[1:-1]) for array in found]
        return [Judged(*one) for one in zip(*parts, strict=True)]

    def _hidden_of(self, parameters, tokens, positions, segments) -> tuple[jax.Array, ...]:
        hidden = [
            sequence_hidden(model.module(own), tokens, positions, segments)
            for model, own in zip(self._models, parameters, strict=True)
        ]
        return tuple(each.reshape(tokens.size, -1) for each in hidden)

    def _comparison(self, parameters, hidden, rows, following) -> Judged:
        theirs, own = (
            sequence_logits(model.module(weights), each[rows])
            for model, weights, each in zip(self._models, parameters, hidden, strict=True)
        )
        p = jax.nn.softmax(theirs[:, : self._tokens])
        ids = self._models[1].output_ids
        if ids is None:
            own = own[:, : self._tokens]
            column, shared = following, p
        else:
            columns = np.full(self._tokens, len(ids), np.int32)
            columns[ids] = np.arange(len(ids))
            column, shared = jnp.asarray(columns)[following], p[:, ids]
        q = jax.nn.softmax(own)
        size = own.shape[1]
        known = column < size
        at = jnp.minimum(column, size - 1)[:, None]
        logit = jnp.take_along_axis(own, at, axis=1)
        before = (own > logit) | ((own == logit) & (jnp.arange(size) < at))
        p_next = jnp.take_along_axis(p, following[:, None], axis=1)[:, 0]
        q_next = jnp.where(known, jnp.take_along_axis(q, at, axis=1)[:, 0], 0.0)
        kept = jnp.where(q_next < p_next, q_next / p_next, 1.0)
        return Judged(
            rank=jnp.where(known, jnp.sum(before, axis=1), size).astype(jnp.int32),
            kept=kept,
            overlap=jnp.sum(jnp.minimum(shared, q), axis=1),
        )
