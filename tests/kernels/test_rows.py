"""Functions of rows: one row at a time or all at once, with the same result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import rows as kernel_rows
from ssd_jax.kernels.rows import (
    LONG,
    Norm,
    _mass_in_one_pass,
    _top_k_in_blocks,
    argmax,
    best_and_mass,
    map_row_blocks,
    map_rows,
    rms_norm,
    row_max,
    row_sum,
    take_rows,
    top_k,
)
from tests.sampling.edits import Edit, edited
from tests.selection import cases

pytestmark = pytest.mark.shipped


def softmax(block):
    weights = jnp.exp(block["logits"] - jnp.max(block["logits"], axis=-1, keepdims=True))
    return {"p": weights / row_sum(weights), "tag": block["tag"] + 1}


def size_of_block(block):
    return jnp.full(block.shape[0], block.shape[0])


@pytest.mark.parametrize("width", [64, LONG - 1, LONG, 2 * LONG])
def test_trees_of_rows_are_mapped_as_by_a_call_on_all_of_them(width):
    rng = np.random.default_rng(width)
    blocks = {
        "logits": rng.normal(0, 3, (5, width)).astype(np.float32),
        "tag": np.arange(5, dtype=np.int32),
    }
    mapped = jax.jit(lambda tree: map_rows(softmax, tree))(blocks)
    at_once = jax.jit(softmax)(blocks)
    np.testing.assert_array_equal(mapped["tag"], blocks["tag"] + 1)
    np.testing.assert_allclose(mapped["p"], at_once["p"], rtol=1e-6)


def test_several_blocks_go_row_by_row_together():
    long, short = np.ones((4, LONG), np.float32), np.arange(4.0, dtype=np.float32)
    sums = jax.jit(lambda *args: map_rows(lambda x, y: x[:, 0] + y, *args))(long, short)
    np.testing.assert_array_equal(sums, short + 1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere all rows go at once")
@pytest.mark.parametrize(("width", "expected"), [(LONG - 1, 6), (LONG, 1), (3 * LONG, 1)])
def test_on_cpu_a_long_row_is_alone_and_short_rows_are_together(width, expected):
    sizes = jax.jit(lambda x: map_rows(size_of_block, x))(np.zeros((6, width), np.float32))
    assert sizes.tolist() == [expected] * 6


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere all rows go at once")
def test_on_cpu_a_branch_is_taken_row_by_row():
    """A row pays for its own settings only: the branch of one is not entered for another."""
    entered = []

    def function(x):
        def dear(x):
            jax.debug.callback(lambda size: entered.append(int(size)), x.shape[0])
            return x[:, 0] + 1

        return jax.lax.cond(jnp.any(x > 0), dear, lambda x: x[:, 0], x)

    x = np.zeros((4, LONG), np.float32)
    x[2] = 1
    result = jax.jit(lambda x: map_rows(function, x))(x)
    jax.effects_barrier()
    np.testing.assert_array_equal(result, [0, 0, 2, 0])
    assert entered == [1]


@pytest.mark.parametrize(("rows", "size"), [(256, 256), (512, 256), (600, 200), (514, 514), (9, 9)])
def test_a_tpu_takes_many_rows_in_blocks_of_one_size(monkeypatch, rows, size):
    """514 are 2 x 257: blocks of 2 rows would be too many."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, tpu, **_: tpu(*x))
    rng = np.random.default_rng(rows)
    x, y = rng.normal(size=(rows, 5)).astype(np.float32), np.arange(rows, dtype=np.float32)

    def function(x, y):
        return {"sum": x + y[:, None], "size": size_of_block(x)}

    found = jax.jit(lambda *blocks: map_row_blocks(function, *blocks))(x, y)
    np.testing.assert_array_equal(found["sum"], x + y[:, None])
    assert found["size"].tolist() == [size] * rows


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rows_are_taken_on_cpu_and_elsewhere(monkeypatch, elsewhere):
    if elsewhere:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, **_: default(*x))
    rows, index = np.arange(3.0 * LONG, dtype=np.float32).reshape(3, LONG), np.array([2, 0, 2, 1])
    np.testing.assert_array_equal(take_rows(jnp.asarray(rows), jnp.asarray(index)), rows[index])


def rows_with_ties():
    rng = np.random.default_rng(1)
    x = rng.integers(0, 5, (64, 300)).astype(np.float32)  # every row has many ties
    x[0] = 7.0
    x[1] = -np.inf
    x[2, [17, 299]] = 9.0
    x[3, 299] = 9.0
    x[4] = np.where(np.arange(300) < 290, -np.inf, -1e30)
    return x


def test_first_best_is_argmax_and_takes_the_lowest_of_equals():
    x = rows_with_ties()
    found = jax.jit(argmax)(x)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, x.argmax(-1))


@pytest.mark.parametrize("width", [300, 5000])
@pytest.mark.parametrize("temperature", [1e-30, 0.3, 1.0, 50.0])
def test_one_pass_finds_what_several_find(temperature, width):
    x = np.random.default_rng(width).normal(0, 3, (9, width)).astype(np.float32)
    x[:5] = np.pad(rows_with_ties()[:5], ((0, 0), (0, width - 300)), constant_values=-np.inf)
    x[1, -1] = -3.0  # and nothing else
    x[6, :-1] = -np.inf
    warm = jnp.full((9, 1), temperature)
    best, index, total = jax.jit(_mass_in_one_pass)(x, warm)
    np.testing.assert_array_equal(best, x.max(-1))
    np.testing.assert_array_equal(index, x.argmax(-1))
    with np.errstate(over="ignore"):
        want = np.exp((x - x.max(-1, keepdims=True)).astype(np.float64) / temperature).sum(-1)
    np.testing.assert_allclose(total[:, 0], want, rtol=2e-5)  # a CPU adds one by one
    in_passes = best_and_mass(x, warm)
    for got, two in zip((best, index, total), in_passes, strict=True):
        np.testing.assert_allclose(got, two, rtol=2e-5)


def test_zeros_of_both_signs_are_equal():
    assert argmax(jnp.array([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])).tolist() == [1, 1]


def test_a_row_without_a_number_still_gives_an_id():
    assert 0 <= int(argmax(jnp.full((1, 5), jnp.nan))[0]) < 5


@pytest.mark.parametrize("width", [320, 49_152])
def test_first_best_of_computed_values_is_argmax_of_what_was_computed(width):
    """What is compared with the maximum must be the very numbers that the maximum is of."""

    def both(x, temperature):
        p = jnp.exp((x - jnp.max(x, axis=-1, keepdims=True)) / temperature)
        values = jnp.log(p / row_sum(p)) - jnp.log(-jnp.log1p(-p * 0.7))
        return argmax(values), jnp.argmax(values, axis=-1)

    rng = np.random.default_rng(width)
    x = rng.normal(0, 4, (16, width)).astype(np.float32)
    found, expected = jax.jit(both)(x, 0.8)
    np.testing.assert_array_equal(found, expected)
    alone = jax.jit(lambda x, t: both(x, t)[0])(x, 0.8)
    np.testing.assert_array_equal(alone, expected)


def test_rows_are_normed_by_their_root_mean_square():
    x = np.array([[3.0, 4.0], [3e-3, 4e-3], [0.0, 0.0]], np.float32)
    want = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * [1.0, 2.0]
    norm = Norm(jnp.array([1.0, 2.0]), 1e-5)
    np.testing.assert_allclose(jax.jit(lambda x: rms_norm(x, norm))(x), want, rtol=1e-5)


def ordered(values, count):
    """The `count` largest of each row and their ids, equal ones by id."""
    ids = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    return np.take_along_axis(values, ids, axis=-1), ids


def rows_of_size(size):
    """Rows whose largest values are scattered, tied within and across blocks, or missing."""
    rng = np.random.default_rng(size)
    x = rng.normal(0, 3, (16, size)).astype(np.float32)
    x[4:8] = rng.integers(0, 3, (4, size))  # ties everywhere
    x[8] = 7.0
    x[9] = -np.inf
    x[10, 3:] = -np.inf  # fewer than are asked for
    x[11, :-1] = -np.inf
    x[12, ::64] = 50.0  # two in every block
    x[13, -5:] = 60.0  # all in the last block, which may be padded
    x[14, size // 2 :] = -1e30
    x[15] = np.arange(size)
    return x


@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("size", cases([300, 2304, 2305, 3001, 9999], 2304, 2305))
def test_largest_is_top_k_and_takes_the_lowest_of_equals(size, count):
    """Below 2,304 = 2 * 9 * 128 values nine are not looked for in blocks."""
    x = rows_of_size(size)
    values, ids = jax.jit(top_k, static_argnums=1)(x, count)
    expected_values, expected_ids = ordered(x, count)
    np.testing.assert_array_equal(values, expected_values)
    np.testing.assert_array_equal(ids, expected_ids)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids, jax.lax.top_k(x, count)[1])


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_largest_may_be_asked_for_nothing(platform):
    search = jax.jit(lambda x: top_k(x, 0))
    x = rows_of_size(3001).repeat(8, axis=0)  # more than a TPU takes at once
    assert [found.shape for found in search(x)] == [(len(x), 0)] * 2
    assert "sort" not in search.trace(x).lower(lowering_platforms=(platform,)).as_text()


def test_largest_may_take_all_there_are():
    x = rows_of_size(40)
    np.testing.assert_array_equal(top_k(jnp.asarray(x), 40)[1], ordered(x, 40)[1])


@pytest.mark.parametrize("width", [16, 32, 128])
@pytest.mark.parametrize("size", cases([4096, 4101, 8016], 4101))
def test_blocks_of_any_width_have_the_largest(width, size):
    rng = np.random.default_rng(size)
    values = rng.integers(0, 300, (3, size)).astype(np.float32)  # many are equal
    best, ids = _top_k_in_blocks(jnp.asarray(values), count=9, width=width)
    expected, order = jax.lax.top_k(values, 9)
    np.testing.assert_array_equal(best, expected)
    np.testing.assert_array_equal(ids, order)


def few_at_once(at_once):
    """Whether blocks that are taken from so many rows at a time have the largest values."""
    x = rows_of_size(3001)
    found = jax.jit(lambda x: _top_k_in_blocks(x, count=9, width=32, rows_at_a_time=at_once))(x)
    return all(map(np.array_equal, found, ordered(x, 9)))


@pytest.mark.parametrize("at_once", [1, 5, 8, 15, 16, None])
def test_blocks_may_be_taken_from_a_few_rows_at_a_time(at_once):
    assert few_at_once(at_once)


TAKEN = {
    "rows of others": ("map(take_row_blocks, (values,", "map(take_row_blocks, (values[::-1],"),
    "the block before": ("[row[1]]", "[row[1] - 1]"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_flaws_in_taking_blocks_are_caught(name):
    with edited([Edit(kernel_rows, "_take_blocks", *TAKEN[name])]):
        assert not few_at_once(5)


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5000), (2, 3, 128)])
def test_the_largest_of_a_row_is_found_either_way(monkeypatch, one_by_one, shape):
    monkeypatch.setattr(kernel_rows, "maxima_one_by_one", lambda: one_by_one)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) - 3
    x[0] = -np.inf
    x[-1, ..., 0] = 9.0
    found = jax.jit(lambda x: row_max(x))(x)
    np.testing.assert_array_equal(found, x.max(axis=-1, keepdims=True))
