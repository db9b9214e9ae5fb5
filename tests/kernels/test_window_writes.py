"""Pages and branches written by windows, as on accelerators: equal to the scatter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous, Scratch
from tests.sampling.edits import Edit, edited
from tests.selection import cases

PAGES, HEADS, WIDTH = 9, 2, 6
TABLE = np.array([[4, 0, 7], [1, 2, 3], [8, 6, 5]])
TABLES = {
    "contiguous": Contiguous(2),
    "one page": TABLE[:, :1],
    "two pages": TABLE[:, :2],
    "three pages": TABLE,
}


def both(table, positions, seed=0):
    """Pages written by a scatter, and by windows."""
    rng = np.random.default_rng(seed)
    table = table if isinstance(table, Contiguous) else jnp.asarray(table)
    positions = jnp.asarray(positions, jnp.int32)
    pages = jnp.asarray(rng.normal(size=(PAGES, HEADS, BLOCK, WIDTH)), jnp.float32)
    values = rng.normal(size=(*positions.shape, HEADS, WIDTH))
    return [
        np.asarray(kv_pages.write(pages, table, positions, jnp.asarray(values), windows=windows))
        for windows in (False, True)
    ]


def check(table, positions, seed=0):
    expected, found = both(table, positions, seed)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.more
@pytest.mark.parametrize("name", TABLES)
def test_random_runs_with_gaps_are_written_as_by_a_scatter(name):
    """Runs begin before, in and behind the pages; any of their tokens may be dropped."""
    rng = np.random.default_rng(1)
    table = TABLES[name]
    most = BLOCK * (1 if isinstance(table, Contiguous) else table.shape[1])
    for count in (1, 2, 5, 40, BLOCK, BLOCK + 3, 2 * BLOCK + 1):
        start = rng.integers(-count, most + 2, (3, 1))
        dropped = rng.choice([-1, most, 10**6], (3, count))
        mask = rng.random((3, count)) < rng.choice([0.1, 0.9, 1])
        check(table, np.where(mask, start + np.arange(count), dropped), count)


@pytest.mark.more
@pytest.mark.parametrize(
    "begin", cases([BLOCK - 4, BLOCK - 3, BLOCK - 1, BLOCK, 2 * BLOCK - 2], BLOCK - 3)
)
def test_runs_at_the_edge_of_a_page(begin):
    for count in (1, 4, BLOCK, 2 * BLOCK):
        run = begin + np.arange(count)
        check(TABLE, np.stack([run, run - 1, run + 1]))
        check(Contiguous(1), np.where(run < BLOCK, run, BLOCK)[None])


def test_idle_rows_and_a_lone_token_among_dropped_ones():
    lone = np.full((3, 6), BLOCK)
    lone[0, 4], lone[2, 0] = 2, BLOCK - 1  # as an expansion writes its tail, whichever branch it is
    expected, found = both(Contiguous(2), lone)
    np.testing.assert_array_equal(found, expected)
    idle, found = both(Contiguous(2), np.full((3, 6), -1))
    np.testing.assert_array_equal(found, idle)
    assert np.argwhere((expected != idle).any(axis=(1, 3))).tolist() == [[2, 2], [4, BLOCK - 1]]


def test_a_run_that_begins_before_the_first_page_reaches_the_second():
    run = np.arange(BLOCK + 3) - 1
    check(TABLE[:1, :2], np.where(run < 0, -1, run)[None])


def test_prompts_are_padded():
    check(np.array([[3]]), np.where(np.arange(40) < 17, 100 + np.arange(40), BLOCK)[None])


def test_no_scatter_is_left():
    """It has XLA change the layout of all layers' pages on a TPU, twice in every layer."""
    pages = jnp.zeros((PAGES, HEADS, BLOCK, WIDTH))
    positions, values = jnp.zeros((3, 5), int), jnp.zeros((3, 5, HEADS, WIDTH))
    scratch = Scratch(jnp.zeros((3, HEADS, 4, 5, WIDTH)), jnp.zeros((3, 5, 2), int))
    for table in (Contiguous(), jnp.asarray(TABLE)):
        for windows in (False, True):
            text = str(
                jax.make_jaxpr(lambda p, w=windows, t=table: (
                    kv_pages.write(p, t, positions, values, windows=w),
                    scratch.write(values, windows=w),
                ))(pages)
            )  # fmt: skip
            assert ("scatter" in text) != windows


MUTANTS = {
    "a window off by one": ("_write_windows", "token = page_start +", "token = 1 + page_start +"),
    "a window that leaves its page": (
        "_write_windows", "jnp.clip(start[row] - page_start, 0, page_size - window)",
        "start[row] - page_start",
    ),
    "one page too few": ("_write_windows", "page_size - 2)", "page_size - 2 - page_size)"),
    "dropped tokens written": ("_write_windows", "written[:, None], new, old", "True, new, old"),
    "another row's values": ("_write_windows", "(row, 0, token, 0)", "(0, 0, token, 0)"),
    "keys and values exchanged": (
        "write", "encode(values, pages.dtype)\n    if windows:",
        "encode(values, pages.dtype)\n    if windows:\n"
        "        values = jnp.roll(values, values.shape[-1] // 2, -1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    function, old, new = MUTANTS[name]

    def caught():
        test_random_runs_with_gaps_are_written_as_by_a_scatter("three pages")
        test_idle_rows_and_a_lone_token_among_dropped_ones()

    with edited([Edit(kv_pages, function, old, new)]), pytest.raises(AssertionError):
        caught()
