"""Runs target and draft over given texts, position by position: teacher forcing.

Texts run in chunks, which are the rows of forwards of one size; the head runs over the requested
positions only, a block of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.opening.models import open_model
from ssd_jax.kernels.kv_pages import BLOCK
from ssd_jax.kernels.rows import map_rows
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.system.stored_jit import StoredJit
from ssd_jax.tools.distill.completions import CompletionJob, Entry, Report, write_shard
from ssd_jax.tools.distill.settings import TargetSettings
from ssd_jax.tools.distill.shards import Sample, decode_texts, encode_scores, read_file
from ssd_jax.tools.distill.training.data import TextPiece, columns_of, first_fit

_CHUNK = 64
"""Tokens of a row. A text is a chain of rows, the last one padded."""

_ROWS = 64
"""Rows of a forward, unless a text has more."""

_HEAD_ROWS = 256
"""Positions whose logits are held at once."""


class _Batch(NamedTuple):
    """Rows of a forward, each one chunk of a text.

    Attributes:
      texts: indices of the texts whose chunks these are.
      table: pages of the row's text.
      learnt: places of the texts' learnt positions among all tokens.
    """

    texts: list[int]
    tokens: Int32[np.ndarray, "B R"]
    positions: Int32[np.ndarray, "B R"]
    visible: Int32[np.ndarray, "B R"]
    table: Int32[np.ndarray, "B P"]
    learnt: Int32[np.ndarray, "n"]


class TextRunner:
    """Models with their weights, run over whole texts by the engine's own forward.

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
        self._pages = -(-longest // BLOCK)
        self._rows = max(_ROWS, -(-longest // _CHUNK))
        self._compare = compare
        self._body, self._head = StoredJit(self._hidden), StoredJit(self._compare_logits)

    def run(self, samples: Sequence[Sample], progress: Progress | None = None) -> list[np.ndarray]:
        """What `compare` returns for the learnt positions, one sample after the other.

        Args:
          samples: without scores.
          progress: called with (positions done, positions).
        """
        ends = np.cumsum([0, *(len(sample.learnt) for sample in samples)])
        results: list[np.ndarray] = []
        num_done = 0
        for batch in self._batches(samples):
            hidden = self._body(self._parameters, *batch[1:5])
            output_rows = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in batch.texts])
            next_tokens = np.concatenate(
                [samples[i].tokens[_learnt_positions(samples[i]) + 1] for i in batch.texts]
            )
            for begin in range(0, len(output_rows), _HEAD_ROWS):
                block = slice(begin, begin + _HEAD_ROWS)
                count = len(output_rows[block])
                places, tokens = np.zeros((2, _HEAD_ROWS), np.int32)
                places[:count], tokens[:count] = batch.learnt[block], next_tokens[block]
                values = jax.device_get(self._head(self._parameters, hidden, places, tokens))
                results = results or [np.zeros((ends[-1], *x.shape[1:]), x.dtype) for x in values]
                for array, value in zip(results, values, strict=True):
                    array[output_rows[block]] = value[:count]
            num_done += len(output_rows)
            if progress is not None:
                progress(num_done, int(ends[-1]))
        return results

    def _batches(self, samples: Sequence[Sample]) -> Iterator[_Batch]:
        """Batches of all texts, in an order that leaves few rows empty."""
        pieces = [TextPiece(i, 0, -(-len(s.tokens) // _CHUNK)) for i, s in enumerate(samples)]
        outside = self._pages * BLOCK  # is not written
        for row_pieces in first_fit(pieces, self._rows):
            tokens = np.zeros((self._rows, _CHUNK), np.int32)
            positions = np.full_like(tokens, outside)
            table = np.zeros((self._rows, self._pages), np.int32)
            learnt, row, page = [], 0, 0
            for index, _, rows in row_pieces:
                sample, chunks = samples[index], slice(row, row + rows)
                size = len(sample.tokens)
                tokens[chunks].flat[:size] = sample.tokens
                positions[chunks].flat[:size] = np.arange(size)
                pages = -(-size // BLOCK)
                table[chunks, :pages] = np.arange(page, page + pages)
                learnt.append(row * _CHUNK + _learnt_positions(sample))
                row, page = row + rows, page + pages
            visible = np.where(positions < outside, positions + 1, 0)
            texts = [piece.text for piece in row_pieces]
            yield _Batch(texts, tokens, positions, visible, table, np.concatenate(learnt))

    def _hidden(self, parameters, tokens, positions, visible, table) -> list[jax.Array]:
        states = []
        for model, params in zip(self._models, parameters, strict=True):
            pages = model.new_pages(self._rows, BLOCK)
            module = model.module(params)
            hidden, _, _ = module.hidden(tokens, positions, visible, pages, table)
            states.append(hidden.reshape(tokens.size, -1))
        return states

    def _compare_logits(self, parameters, hidden, rows, next_tokens) -> Sequence[jax.Array]:
        runs = zip(self._models, parameters, hidden, strict=True)
        logits = [model.module(params).logits(states[rows]) for model, params, states in runs]
        return self._compare(logits, next_tokens)


def _learnt_positions(sample: Sample) -> Int32[np.ndarray, "n"]:
    return np.array(sample.learnt, np.int32)


def load_scorer(
    target: TargetSettings, *, longest: int, top_n: int, progress: Progress | None = None
) -> TextRunner:
    """Loads the target, whose runs return its likeliest tokens at temperature 1.

    They are ids [rows, N] int32 and probabilities [rows, N] float32, likeliest first. Padding ids
    of the model have no part in the distribution.

    Args:
      longest: tokens of the longest text.
      progress: of loading its weights.

    Raises:
      InputError: a checkpoint that cannot be used.
    """
    opened_model = open_model(target.source, target.dtype)

    def top(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        likeliest, ids = jax.lax.top_k(logits, top_n)
        return ids, jnp.exp(likeliest - jax.nn.logsumexp(logits, axis=-1, keepdims=True))

    def compare(logits: list[jax.Array], _next_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        return map_rows(top, logits[0][:, : opened_model.tokenizer.size])

    return TextRunner([(opened_model.model, opened_model.load(progress))], compare, longest=longest)


def score_shards(job: CompletionJob, shards: Iterable[tuple[int, Entry]]) -> Iterator[Report]:
    """Scores shards by their places, from their entries; the first report says it is ready.

    Raises:
      InputError: a model that cannot be used.
    """
    with job.bar("loading weights", unit="bytes") as progress:
        top_n = job.settings.top_n
        scorer = load_scorer(job.target, longest=job.context, top_n=top_n, progress=progress)
    yield Report()
    for index, entry in shards:
        samples = decode_texts(read_file(job.directory, entry))
        name = entry["file"].replace(".safetensors", ".scores.safetensors")
        ids, probs = scorer.run(samples)
        data = encode_scores(ids, probs, job.vocabulary)
        scores = write_shard(job.directory, name, data)
        yield Report(entry["generated"], len(samples), (index, {**entry, "scores": scores}))


class DraftFigures(NamedTuple):
    """Figures of each token of a completion [m], from p and q at temperature 1.

    Attributes:
      rank: int32, its place in the draft's distribution, 0 being the likeliest (of equal ones the
        lowest id goes first); the number of ids that the draft can propose, if it is none of them.
      acceptance: float32, min(1, q / p): chance that it was proposed and accepted, given it came.
      overlap: float32, sum over all ids of min(p, q): chance that a proposal is accepted there.
    """

    rank: Any
    acceptance: Any
    overlap: Any


def judge(
    target: tuple[FunctionalModel, Parameters],
    draft: tuple[FunctionalModel, Parameters],
    texts: Sequence[Sample],
    *,
    tokens: int,
    longest: int,
    progress: Progress | None = None,
) -> list[DraftFigures]:
    """Judges a draft by texts; one result for each text, in order.

    Args:
      texts: with a prompt and a completion of at least one token each.
      tokens: number of ids of the tokenizer; columns of a head beyond them are padding.
      longest: tokens of the longest text that the programs are for.
    """
    ids = draft[0].output_ids

    def compare(logits: list[jax.Array], next_tokens: jax.Array) -> DraftFigures:
        return _draft_figures(logits[0][:, :tokens], logits[1], ids, next_tokens)

    results = TextRunner([target, draft], compare, longest=longest).run(texts, progress)
    ends = np.cumsum([len(text.learnt) for text in texts])[:-1]
    return [
        DraftFigures(*figures)
        for figures in zip(*(np.split(x, ends) for x in results), strict=True)
    ]


def _draft_figures(
    target_logits: jax.Array,
    draft_logits: jax.Array,
    ids: np.ndarray | None,
    next_tokens: jax.Array,
) -> DraftFigures:
    """Judges tokens that came, from logits of the target and the draft, whose columns are `ids`."""
    p = jax.nn.softmax(target_logits)
    if ids is None:
        draft_logits = draft_logits[:, : p.shape[1]]
        column, p_draftable = next_tokens, p
    else:
        column = jnp.asarray(columns_of(ids, p.shape[1]))[next_tokens]
        p_draftable = p[:, ids]
    q = jax.nn.softmax(draft_logits)
    size = draft_logits.shape[1]
    is_draftable = column < size
    draft_column = jnp.minimum(column, size - 1)[:, None]
    logit = jnp.take_along_axis(draft_logits, draft_column, axis=1)
    is_likelier = (draft_logits > logit) | (
        (draft_logits == logit) & (jnp.arange(size) < draft_column)
    )
    p_next = jnp.take_along_axis(p, next_tokens[:, None], axis=1)[:, 0]
    q_next = jnp.where(is_draftable, jnp.take_along_axis(q, draft_column, axis=1)[:, 0], 0.0)
    return DraftFigures(
        rank=jnp.where(is_draftable, jnp.sum(is_likelier, axis=1), size).astype(jnp.int32),
        acceptance=jnp.where(q_next >= p_next, 1.0, q_next / p_next),  # NaN is not accepted
        overlap=jnp.sum(jnp.minimum(p_draftable, q), axis=1),
    )
