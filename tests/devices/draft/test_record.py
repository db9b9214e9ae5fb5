"""Putting drawn tokens into records, row by row."""

import jax
import numpy as np

from ssd_jax.devices.draft import record
from ssd_jax.sampling.drafting import Draw
from tests.sampling.rows import QUICKLY

ROWS, K, N, W, H = 5, 3, 2, 4, 6

put = jax.jit(record.put, compiler_options=QUICKLY)
where = jax.jit(record.where, compiler_options=QUICKLY)
empty = jax.jit(lambda: record.empty(ROWS, K, N, W, H), compiler_options=QUICKLY)


def test_a_draw_goes_to_its_own_place_in_the_live_rows_only():
    """A row without room for one more keeps what it has."""
    base = np.arange(ROWS, dtype=np.int32)[:, None] + 7
    support, candidates = base * 10 + np.arange(N), base * 100 + np.arange(W)
    q = (1 / (base + np.arange(1.0, N + 1))).astype(np.float32)
    confidence = base[:, 0] * 9
    drawn = Draw(*map(np.asarray, (base[:, 0], support, q, candidates, confidence)))  # pyright: ignore[reportArgumentType]
    hidden = (base * 1000 + np.arange(H)).astype(np.float32)
    before = empty()
    place, live = np.array([0, 2, 1, 2, K]), np.array([True, True, True, False, True])
    after = put(before, drawn, hidden, place, live)

    def in_order(records: record.Record):
        tokens, _, support, q = records.proposal
        return tokens, support, q, records.candidates, records.confidence, records.hidden

    for old, new, values in zip(in_order(before), in_order(after), (*drawn, hidden), strict=True):
        expected = np.array(old)
        expected[[0, 1, 2], place[:3]] = values[:3]
        np.testing.assert_array_equal(new, expected)
        assert new.dtype == old.dtype
        assert not np.array_equal(expected, old)
    np.testing.assert_array_equal(after.proposal.length, before.proposal.length)
    np.testing.assert_array_equal(after.start, before.start)
    np.testing.assert_array_equal(after.pending, before.pending)


def test_states_are_not_kept_where_there_is_no_room_for_them():
    nothing = np.zeros(1, np.int32)
    drawn = Draw(nothing, nothing[:, None], np.ones((1, 1), np.float32), nothing[:, None], nothing)  # pyright: ignore[reportArgumentType]
    after = put(record.empty(1, K, 1, 1), drawn, np.ones((1, H), np.float32), nothing, nothing == 0)
    assert after.hidden.shape == (1, K, 0)


def test_records_are_chosen_row_by_row_with_all_that_is_theirs():
    ones, twos = (jax.tree.map(lambda array, n=n: np.full_like(array, n), empty()) for n in (1, 2))
    rows = np.array([True, False, False, True, False])
    for array in jax.tree.leaves(where(rows, ones, twos)):
        assert ((array == 1).reshape(ROWS, -1).all(1) == rows).all()
        assert ((array == 2).reshape(ROWS, -1).all(1) == ~rows).all()


def test_an_empty_record_is_idle_and_says_nothing():
    idle = empty()
    assert (np.asarray(idle.start) == -1).all()
    assert not np.asarray(idle.proposal.length).any()
    assert (np.asarray(idle.candidates) == -1).all()
