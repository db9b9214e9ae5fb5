"""Rows of packed texts: every next token of a completion once, in an order of (seed, step)."""

import dataclasses

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.shards import Sample
from ssd_jax.tools.distill.training import data
from ssd_jax.tools.distill.training.data import PADDING, pack, rows_of_step

LENGTH, TOP = 10, 3


def texts(rng, count=23, longest=27):
    made = []
    for _ in range(count):
        size = int(rng.integers(2, longest))
        made.append(
            Sample(
                tokens=rng.integers(1, 1000, size).astype(np.int32),
                prompt_length=int(rng.integers(0, size)),
                top_ids=rng.integers(0, 1000, (size, TOP)).astype(np.int32),
                top_probs=rng.random((size, TOP)).astype(np.float32),
            )
        )
    return made


def transitions(given):
    """What is to be learnt: (token, next token, its likeliest id), of every completion."""
    return sorted(
        (int(t.tokens[i]), int(t.tokens[i + 1]), int(t.top_ids[i, 0]))
        for t in given
        for i in range(max(t.prompt_length - 1, 0), len(t.tokens) - 1)
    )


def test_every_next_token_of_a_completion_counts_once():
    given = texts(np.random.default_rng(0))
    packed = pack(given, length=LENGTH, seed=1, label="texts")
    batch = packed.batch(range(len(packed)))
    found = zip(
        batch.tokens[batch.loss_mask],
        batch.next_tokens[batch.loss_mask],
        batch.top_ids[batch.loss_mask][:, 0],
        strict=True,
    )
    assert sorted((int(a), int(b), int(c)) for a, b, c in found) == transitions(given)
    assert not batch.next_tokens[~batch.loss_mask].any()


def test_rows_are_full_segments_apart_and_positions_from_zero():
    packed = pack(texts(np.random.default_rng(2)), length=LENGTH, seed=1, label="texts")
    batch = packed.batch(range(len(packed)))
    assert (batch.segments != PADDING).mean() > 0.8
    for positions, segments in zip(batch.positions, batch.segments, strict=True):
        for number in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == number)
            np.testing.assert_array_equal(places, np.arange(places[0], places[-1] + 1))
            np.testing.assert_array_equal(positions[places], np.arange(len(places)))
    last = np.diff(batch.segments, axis=1, append=PADDING) != 0
    assert not (batch.loss_mask & last).any()
    assert not (batch.loss_mask & (batch.segments == PADDING)).any()


def test_the_last_token_of_a_text_in_a_full_row_is_not_followed_by_another_text():
    one, other = (Sample(tokens=np.full(5, token, np.int32), prompt_length=0) for token in (7, 8))
    batch = pack([one, other], length=LENGTH, seed=0, label="texts").batch([0])
    assert {*map(int, batch.next_tokens[batch.tokens == 7])} <= {0, 7}
    assert batch.loss_mask.sum() == 8


def test_texts_in_few_bits_make_the_batch_of_the_same_ones_in_many():
    wide = [
        dataclasses.replace(text, top_probs=text.top_probs.astype(np.float16).astype(np.float32))
        for text in texts(np.random.default_rng(6))
    ]
    for ids in (np.uint16, np.uint32):
        few = [
            Sample(
                tokens=text.tokens.astype(ids),
                prompt_length=text.prompt_length,
                top_ids=text.top_ids.astype(ids),
                top_probs=text.top_probs.astype(np.float16),
            )
            for text in wide
        ]
        one, other = (pack(t, length=LENGTH, seed=1, label="texts") for t in (wide, few))
        for part, same in zip(one.batch([0, 3]), other.batch([0, 3]), strict=True):
            assert part.dtype == same.dtype
            np.testing.assert_array_equal(part, same)


def test_a_row_beyond_the_last_is_empty():
    packed = pack(texts(np.random.default_rng(3)), length=LENGTH, seed=1, label="texts")
    batch = packed.batch([0, -1])
    assert batch.segments[0].any()
    assert not batch.segments[1].any()
    assert not batch.loss_mask[1].any()


def test_rows_of_a_step_depend_on_seed_and_step_alone_and_come_once_before_any_again():
    rows = [rows_of_step(11, batch=4, seed=5, step=step) for step in range(11)]
    again = [rows_of_step(11, batch=4, seed=5, step=step) for step in reversed(range(11))]
    assert rows == again[::-1]
    flat = [row for step in rows for row in step]
    for epoch in range(4):
        assert sorted(flat[epoch * 11 : (epoch + 1) * 11]) == list(range(11))
    assert flat[:11] != flat[11:22]
    assert rows[0] != rows_of_step(11, batch=4, seed=6, step=0)


def test_rows_are_put_in_order_once_an_epoch_not_once_a_row(monkeypatch):
    rows, epochs, order = rows_of_step(11, batch=16, seed=5, step=0), [], data._order

    def counted(count, seed, epoch):
        epochs.append(epoch)
        return order(count, seed, epoch)

    monkeypatch.setattr(data, "_order", counted)
    assert rows_of_step(11, batch=16, seed=5, step=0) == rows
    assert sorted(epochs) == [0, 1]


def test_the_digest_is_of_texts_and_their_places():
    given = texts(np.random.default_rng(4))
    digest = pack(given, length=LENGTH, seed=1, label="texts").digest()
    assert pack(given, length=LENGTH, seed=1, label="texts").digest() == digest
    assert pack(given, length=LENGTH, seed=2, label="texts").digest() != digest
    assert pack(given[:-1], length=LENGTH, seed=1, label="texts").digest() != digest


def test_texts_without_completions_and_unequal_scores_are_refused():
    prompt = Sample(tokens=np.arange(4, dtype=np.int32), prompt_length=4)
    with pytest.raises(InputError, match="none of 1 texts has a token of a completion"):
        pack([prompt], length=LENGTH, seed=0, label="texts")
    scored = texts(np.random.default_rng(5), count=1)[0]
    with pytest.raises(InputError, match=r"\[0, 3\] cached probabilities"):
        pack([prompt, scored], length=LENGTH, seed=0, label="texts")
