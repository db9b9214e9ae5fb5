"""Fan-outs divided over several drafts: every outcome is somebody's, and only his."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_jax.speculation.division import divide, share


@st.composite
def fan_outs(draw):
    """Rows of F_0..F_L, F_L at least 1, and some without branches."""
    k = draw(st.integers(1, 6))

    def row():
        last = draw(st.integers(0, k))
        before = draw(st.lists(st.integers(0, 5), min_size=last, max_size=last))
        return [*before, draw(st.integers(1, 6)), *[0] * (k - last)]

    rows = [row() if draw(st.booleans()) else [0] * (k + 1) for _ in range(draw(st.integers(1, 4)))]
    return np.array(rows, np.int32)


@given(counts=fan_outs(), parts=st.integers(1, 5))
def test_every_branch_is_made_once(counts, parts):
    size = share(int(counts.sum(axis=1).max()), parts)
    division = divide(counts, parts, size)
    assert division.counts.sum(axis=2).max(initial=0) <= size
    for row, counts_of_row in enumerate(counts):
        outcomes = [(k, rank) for k, count in enumerate(counts_of_row) for rank in range(count)]
        made = []
        for number in range(parts):
            pairs = zip(division.counts[number, row], division.skip[number, row], strict=True)
            here = [(k, skip + n) for k, (count, skip) in enumerate(pairs) for n in range(count)]
            places = division.places[number, row]
            assert (places[len(here) :] == -1).all()
            for outcome, place in zip(here, places.tolist(), strict=False):
                assert (place >= 0) == (outcome in outcomes)
                if place >= 0:
                    assert outcomes[place] == outcome
                    made.append(place)
        assert sorted(made) == list(range(len(outcomes)))


@given(counts=fan_outs(), parts=st.integers(1, 5))
def test_every_part_runs_the_last_proposed_token_and_has_as_much_to_do(counts, parts):
    division = divide(counts, parts, share(int(counts.sum(axis=1).max()), parts))
    for row, counts_of_row in enumerate(counts):
        found = division.counts[:, row]
        if not counts_of_row.any():
            assert not found.any()
            continue
        last = np.flatnonzero(counts_of_row)[-1]
        assert (found[:, last] > 0).all()
        assert np.ptp(found.sum(axis=1)) <= parts


@pytest.mark.parametrize(
    ("fan_out", "counts", "skip"),
    [
        ([3, 2, 1, 4], [[3, 0, 0, 2], [0, 2, 1, 2]], [[0, 0, 0, 0], [3, 0, 0, 2]]),
        ([4, 0, 0, 1], [[2, 0, 0, 1], [2, 0, 0, 1]], [[0, 0, 0, 0], [2, 0, 0, 1]]),
        ([5, 0, 0, 0], [[3, 0, 0, 0], [2, 0, 0, 0]], [[0, 0, 0, 0], [3, 0, 0, 0]]),
    ],
    ids=["even", "one more at the end", "no proposal"],
)
def test_two_parts_share_branches_as_worked_out_by_hand(fan_out, counts, skip):
    division = divide(np.array([fan_out], np.int32), 2, share(sum(fan_out), 2))
    assert division.counts[:, 0].tolist() == counts
    assert division.skip[:, 0].tolist() == skip


@given(counts=fan_outs(), parts=st.integers(1, 4), size=st.integers(2, 6))
def test_where_there_is_little_room_the_likeliest_outcomes_are_made(counts, parts, size):
    division = divide(counts, parts, size)
    assert division.counts.sum(axis=2).max(initial=0) <= size
    for row, counts_of_row in enumerate(counts):
        ends, places = counts_of_row.cumsum(), division.places[:, row]
        made = {place for place in places.ravel().tolist() if place >= 0}
        assert len(made) == min(counts_of_row.sum(), parts * size - (parts - 1))
        for begin, end in zip(ends - counts_of_row, ends, strict=True):
            of_k = sorted(place for place in made if begin <= place < end)
            assert of_k == list(range(begin, begin + len(of_k)))  # the first ranks of each k
        if counts_of_row.any():
            assert (division.counts[:, row, np.flatnonzero(counts_of_row)[-1]] > 0).all()
