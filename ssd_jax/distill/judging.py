"""What a draft would have made of given texts, position by position: teacher forcing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.distill.rows import batches, room
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.models.sequence import sequence_hidden, sequence_logits

_HEAD_ROWS = 256
"""Positions whose logits are held at once."""


class Text(NamedTuple):
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
        self, texts: Sequence[Text], progress: Callable[[int, int], None] | None = None
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
