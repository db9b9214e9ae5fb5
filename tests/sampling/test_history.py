"""Penalties and bias against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.sampling import penalties
from ssd_jax.sampling.penalties import penalise
from tests.sampling.rows import history_of, rows

LOGITS = jnp.array([[2.0, -1.0, 0.5, 0.0]])
HISTORY = history_of(
    jnp.array([[True, False, False, True]]), jnp.array([[0, 2, 0, 1]]), [[1, 3, 1]]
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [2.0, -1.0, 0.5, 0.0]),
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 0.0]),
        ({"repetition_penalty": 0.5}, [4.0, -0.5, 0.5, 0.0]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 0.5, -0.5]),
        ({"frequency_penalty": -0.5}, [2.0, 0.0, 0.5, 0.5]),
        ({"presence_penalty": 0.5}, [2.0, -1.5, 0.5, -0.5]),
        ({"presence_penalty": -0.5}, [2.0, -0.5, 0.5, 0.5]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0}, [1.0, -4.0, 0.5, -1.0]),
        ({"bias_ids": (2, 10**9), "bias": (3.0, 7.0)}, [2.0, -1.0, 3.5, 0.0]),
        ({"bias_ids": (3,), "bias": (3.0,)}, [2.0, -1.0, 0.5, 3.0]),
    ],
)
def test_each_penalty_is_applied_once(settings, expected):
    np.testing.assert_allclose(penalise(LOGITS, rows(settings), lambda: HISTORY), [expected])


def test_a_row_without_penalties_is_untouched_beside_one_with():
    both = history_of(jnp.repeat(HISTORY.prompt, 2, 0), jnp.repeat(HISTORY.output, 2, 0))
    settings = rows({}, {"presence_penalty": 1.0})
    got = penalise(jnp.repeat(LOGITS, 2, 0), settings, lambda: both)
    np.testing.assert_array_equal(got[0], LOGITS[0])
    assert not np.array_equal(got[1], LOGITS[0])


def test_a_new_prompt_empties_its_row_only():
    history = history_of(jnp.ones((2, 4), bool), jnp.full((2, 4), 3), [[3, 1], [2, 0]])
    history = jax.tree.map(jnp.asarray, history)
    # 4 is padding of the chunk.
    after = penalties.add_prompt(history, jnp.array(1), jnp.array([2, 2, 4]), jnp.array(True))
    assert after.prompt.tolist() == [[True] * 4, [False, False, True, False]]
    assert after.output.tolist() == [[3] * 4, [0] * 4]
    assert ends(after.recent) == [[3, 1], []]
    more = penalties.add_prompt(after, jnp.array(1), jnp.array([0, 4, 4]), jnp.array(False))
    assert more.prompt[1].tolist() == [True, False, True, False]


def test_output_that_is_recalled_is_counted_without_its_padding():
    history = jax.tree.map(jnp.asarray, HISTORY)
    history = penalties.recall_output(history, jnp.array(0), jnp.array([1, 2, 1, -1, -1]))
    assert history.output.tolist() == [[0, 4, 1, 1]]
    assert ends(history.recent) == [[1, 3, 1, 1, 2, 1]]


def test_tokens_in_flight_are_added_one_row_after_the_other():
    history = history_of(jnp.zeros((2, 3), bool), jnp.array([[1, 0, 0], [0, 0, 0]]), [[0], []])
    seen = penalties.in_flight(
        history,
        jnp.array([[0, 2], [1, 1]]),
        jnp.array([0, 0, 0, 1, 1, 1]),
        chain_path(jnp.array([0, 1, 2, 0, 1, 2])),
    )
    assert seen.output.tolist() == [
        [1, 0, 0], [2, 0, 0], [2, 0, 1],
        [0, 0, 0], [0, 1, 0], [0, 2, 0],
    ]  # fmt: skip
    assert ends(seen.recent) == [[0], [0, 0], [0, 0, 2], [], [1], [1, 1]]


def ends(recent):
    """The tokens of every row, which have nothing between them and the end."""
    found = []
    for row in np.asarray(recent).tolist():
        found.append([token for token in row if token >= 0])
        assert row == [-1] * (len(row) - len(found[-1])) + found[-1]
    return found


def test_the_last_tokens_of_an_output_stay_in_order_whatever_is_between_them():
    history = jax.tree.map(
        jnp.asarray, history_of(jnp.zeros((2, 9), bool), jnp.zeros((2, 9), jnp.int32))
    )
    history = penalties.add_output(history, jnp.array([[3, -1, 0], [-1, -1, -1]]))
    assert ends(history.recent) == [[3, 0], []]
    history = penalties.add_output(history, jnp.array([[1, -1, 2, 4, 5], [-1, 7, -1, 7, -1]]))
    assert ends(history.recent) == [[3, 0, 1, 2, 4, 5], [7, 7]]
    history = penalties.add_output(history, jnp.array([[6, 8, 8], [0, 1, 2]]))
    assert ends(history.recent) == [[1, 2, 4, 5, 6, 8, 8], [7, 7, 0, 1, 2]]


def test_tokens_that_have_no_column_are_among_the_last_ones():
    outputs = np.array([1, 4], np.int32)
    history = jax.tree.map(
        jnp.asarray, history_of(jnp.zeros((1, 2), bool), jnp.zeros((1, 2), jnp.int32))
    )
    history = penalties.add_output(history, jnp.array([[4, 3, 4]]), outputs)
    assert history.output.tolist() == [[0, 2]]
    assert ends(history.recent) == [[4, 3, 4]]
