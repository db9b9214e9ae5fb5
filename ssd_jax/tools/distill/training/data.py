"""Texts to learn from: which are set aside, the rows they are packed into, the ids they use.

Texts that share a row do not see each other, and count once. The rows of a step are a function of
(seed, step) alone, so that a run that was stopped continues with the rows it would have had.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.shards import Sample

PADDING = 0
"""Segment of positions without text."""

_OPEN_ROWS = 64
"""Rows that are being filled at a time."""

_PASSAGE_PREFIX = 8
"""Tokens that identify a passage, and the fewest that it has: completions differ after it."""


class PackedBatch(NamedTuple):
    """Rows of packed texts; a position counts if its next token is of a completion."""

    tokens: np.ndarray  # [B, T] int32
    positions: np.ndarray  # [B, T] int32, from the start of the text or piece
    segments: np.ndarray  # [B, T] int32, from 1 in each row; PADDING elsewhere
    loss_mask: np.ndarray  # [B, T] bool
    next_tokens: np.ndarray  # [B, T] int32, the next token; 0 where not counted
    top_ids: np.ndarray  # [B, T, N] int32; N is 0 without cached probabilities
    top_probs: np.ndarray  # [B, T, N] float32


class TextPiece(NamedTuple):
    """Tokens `start` to `stop` of a text, which is identified by its place among all."""

    text: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class PackedTexts:
    """Texts and the rows they were packed into.

    Attributes:
      length: tokens of a row.
      width: N, cached probabilities a position.
    """

    texts: Sequence[Sample]
    rows: Sequence[Sequence[TextPiece]]
    length: int
    width: int

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, rows: Sequence[int]) -> PackedBatch:
        """These rows, whatever types their texts have; a negative index is an empty row."""
        shape = (len(rows), self.length)
        packed = PackedBatch(
            *np.zeros((3, *shape), np.int32),
            loss_mask=np.zeros(shape, bool),
            next_tokens=np.zeros(shape, np.int32),
            top_ids=np.zeros((*shape, self.width), np.int32),
            top_probs=np.zeros((*shape, self.width), np.float32),
        )
        for i, row in enumerate(rows):
            if row >= 0:
                self._fill(packed, i, self.rows[row])
        return packed

    def _fill(self, packed: PackedBatch, row: int, pieces: Sequence[TextPiece]) -> None:
        begin = 0
        for number, (index, start, stop) in enumerate(pieces):
            text, size = self.texts[index], stop - start
            end = begin + size
            packed.tokens[row, begin:end] = text.tokens[start:stop]
            packed.positions[row, begin:end] = np.arange(size)
            packed.segments[row, begin:end] = PADDING + 1 + number
            is_learnt = np.arange(start + 1, stop) >= text.prompt_length
            packed.loss_mask[row, begin : end - 1] = is_learnt
            packed.next_tokens[row, begin : end - 1] = text.tokens[start + 1 : stop] * is_learnt
            if text.top_ids is not None and text.top_probs is not None:
                packed.top_ids[row, begin:end] = text.top_ids[start:stop]
                packed.top_probs[row, begin:end] = text.top_probs[start:stop]
            begin = end

    def digest(self) -> str:
        """SHA-256 of the texts and of how they are packed."""
        digest = hashlib.sha256()
        for text in self.texts:
            for array in (text.tokens, text.top_ids, text.top_probs):
                if array is not None:
                    digest.update(np.ascontiguousarray(array).data)
            digest.update(f"{len(text.tokens)} {text.prompt_length}\0".encode())
        digest.update(repr([list(map(tuple, row)) for row in self.rows]).encode())
        return digest.hexdigest()


def pack(texts: Sequence[Sample], *, length: int, seed: int, label: str) -> PackedTexts:
    """Packs texts into rows by first fit, in an order that the seed gives.

    A text longer than a row is cut into pieces that overlap by one token, so that every next token
    is predicted once; a piece without anything that counts is left out.

    Args:
      texts: all with the same number of cached probabilities a position, or all without.
      length: tokens of a row.
      seed: of the order in which texts are placed.
      label: names the texts in errors.

    Raises:
      InputError: no text has anything that counts, or texts differ in their cached probabilities.
    """
    widths = {0 if text.top_ids is None else text.top_ids.shape[1] for text in texts}
    if len(widths) > 1:
        raise InputError(
            f"{label}: texts have {sorted(widths)} cached probabilities a position; make the "
            "scores of all of them with the same settings"
        )
    pieces = [piece for i, text in enumerate(texts) for piece in _pieces(i, text, length)]
    if not pieces:
        raise InputError(
            f"{label}: none of {len(texts)} texts has a token of a completion; generate some first"
        )
    order = np.random.default_rng(seed).permutation(len(pieces))
    rows = first_fit([pieces[i] for i in order], length)
    return PackedTexts(texts, rows, length, widths.pop())


def rows_of_step(count: int, *, batch: int, seed: int, step: int) -> list[int]:
    """Rows of a step: every row comes once, in an order of that epoch, before any comes again."""
    epoch_ranks = [divmod(index, count) for index in range(step * batch, (step + 1) * batch)]
    orders = {epoch: _order(count, seed, epoch) for epoch in {epoch for epoch, _ in epoch_ranks}}
    return [int(orders[epoch][rank]) for epoch, rank in epoch_ranks]


def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _pieces(index: int, text: Sample, length: int) -> list[TextPiece]:
    size, pieces = len(text.tokens), []
    for start in range(0, max(size - 1, 0), length - 1):
        stop = min(start + length, size)
        if stop > max(start + 1, text.prompt_length):
            pieces.append(TextPiece(index, start, stop))
    return pieces


def first_fit(pieces: Sequence[TextPiece], length: int) -> list[list[TextPiece]]:
    """Rows of at most `length` tokens, each piece in the first that has room."""
    rows: list[list[TextPiece]] = []
    open_rows: list[tuple[int, int]] = []  # (row, tokens left)
    for piece in pieces:
        size = piece.stop - piece.start
        fit = next((i for i, (_, free) in enumerate(open_rows) if free >= size), None)
        if fit is None:
            rows.append([])
            open_rows.append((len(rows) - 1, length))
            fit = len(open_rows) - 1
        row, free = open_rows.pop(fit)
        rows[row].append(piece)
        if free - size > 1:
            open_rows.insert(fit, (row, free - size))
        if len(open_rows) > _OPEN_ROWS:
            open_rows.pop(0)
    return rows


def set_aside(
    texts: Sequence[Sample], *, tokens: int, seed: int, label: str
) -> tuple[list[Sample], list[Sample]]:
    """Texts to learn from, and held-out texts of at least `tokens` tokens in all.

    All completions of a prompt are on one side, and so are all of a passage of plain text, which
    is identified by its beginning.

    Raises:
      InputError: nothing would be left to learn from.
    """
    groups: dict[tuple[bool, bytes], list[Sample]] = {}
    for text in texts:
        begin = np.ascontiguousarray(text.tokens[: text.prompt_length or _PASSAGE_PREFIX])
        groups.setdefault((text.prompt_length > 0, begin.tobytes()), []).append(text)
    names, aside, size = list(groups), [], 0
    for index in np.random.default_rng([seed, 1]).permutation(len(names)):
        if size >= tokens:
            break
        group = groups.pop(names[index])
        aside += group
        size += sum(len(text.tokens) for text in group)
    if not groups:
        raise InputError(
            f"{label}: {len(texts)} texts of {len(names)} prompts leave nothing to learn from "
            f"beside {tokens} held-out tokens; lower held_out, or generate more"
        )
    return [text for group in groups.values() for text in group], aside


def most_frequent(
    texts: Iterable[Sample], *, count: int, size: int, always: Collection[int]
) -> np.ndarray:
    """The most frequent ids of completions: a draft's reduced output vocabulary.

    Args:
      texts: whose completions are counted; plain text counts whole.
      size: number of ids of the tokenizer; later ones are padding.
      always: ids that are chosen however rare, such as those that end a text.

    Returns: [count] int32, ascending. Of equally frequent ids the lowest are chosen.
    """
    frequencies = np.zeros(size, np.int64)
    for text in texts:
        frequencies += np.bincount(text.tokens[text.prompt_length :], minlength=size)[:size]
    frequencies[list(always)] = np.iinfo(np.int64).max
    ids = np.argsort(-frequencies, kind="stable")[:count]
    return np.sort(ids).astype(np.int32)


def columns_of(ids: np.ndarray, size: int) -> np.ndarray:
    """[size] int32: the place of each id in `ids`; `len(ids)` for one that is not in it."""
    columns = np.full(size, len(ids), np.int32)
    columns[ids] = np.arange(len(ids), dtype=np.int32)
    return columns
