"""Every backend of `tree_attention` passes this one suite."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from ssd_jax.kernels.kv_pages import BLOCK, Contiguous, Scratch, encode, write
from ssd_jax.kernels.tree_attention import api
from ssd_jax.kernels.tree_attention.api import BACKENDS, why_missing
from ssd_jax.kernels.tree_attention.cpu import POSITIONS
from ssd_jax.kernels.tree_attention.variant import NOTHING, PLAIN, AttentionVariant
from tests.kernels import attention_cases
from tests.selection import cases

tree_attention = jax.jit(api.tree_attention, static_argnames="backend")
written = jax.jit(write)

STORAGE = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "bfloat16 bits": jnp.uint16}
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "bfloat16 bits": 2e-6}

COMPILED = pytest.param(
    "cpu", marks=pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")
)

pytestmark = pytest.mark.parametrize(
    "backend", [COMPILED if name == "cpu" else name for name in BACKENDS]
)


def _random(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _pages(k, v, storage, page_size, table):
    """Pages holding k and v [B, kv_heads, T, D] under a page table [B, P]; the rest is NaN, as an
    earlier request may have left it."""
    values = np.concatenate([k, v], axis=-1)
    batch, heads, length, width = values.shape
    pages = np.full((int(table.max()) + 1, heads, page_size, width), np.nan, np.float32)
    positions = np.broadcast_to(np.arange(length), (batch, length))
    values = values.transpose(0, 2, 1, 3)
    return written(encode(jnp.asarray(pages), jnp.dtype(storage)), table, positions, values)


def _one_query(q, keys, values):
    """Softmax attention of one query head, float64: q [D], keys and values [T, D]."""
    scores = keys.astype(np.float64) @ q * q.size**-0.5
    weights = np.exp(scores - scores.max())
    return weights / weights.sum() @ values


def _rounded(x, storage):
    return np.asarray(x if storage == "float32" else jnp.asarray(x, jnp.bfloat16), np.float32)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("page_size", cases([3 * BLOCK, BLOCK, 16, 32, 64, 192], BLOCK, 16))
def test_each_query_sees_its_visible_prefix(backend, storage, page_size):
    batch, rows, heads, kv_heads, head_dim, length = 3, 4, 6, 2, 8, 300
    k = _random((batch, kv_heads, length, head_dim), 1)
    v = _random((batch, kv_heads, length, head_dim), 2)
    if page_size == 3 * BLOCK:
        table, page_table = np.array([[1], [2], [3]]), Contiguous(1)
    else:
        in_a_row = -(-length // page_size)
        table = np.random.default_rng(4).permutation(batch * in_a_row).reshape(batch, -1)
        page_table = jnp.asarray(table)
    kv_pages = _pages(k, v, STORAGE[storage], page_size, table)
    q = _random((batch, rows, heads, head_dim), 3)
    visible = np.array([[1, 2, 3, 4], [300, 127, 128, 129], [0, 256, 257, 5]])
    attend = functools.partial(
        tree_attention,
        *(jnp.asarray(q), kv_pages, page_table, jnp.asarray(visible)),
        backend=backend,
    )
    if backend == "cpu" and page_size % POSITIONS:
        with pytest.raises(jax.errors.JaxRuntimeError, match="page_size is no multiple of 64"):
            attend()
        return
    got = attend()
    k, v = _rounded(k, storage), _rounded(v, storage)
    for b, r, h in np.ndindex(batch, rows, heads):
        seen, group = visible[b, r], h // (heads // kv_heads)
        expected = (
            _one_query(q[b, r, h], k[b, group, :seen], v[b, group, :seen]) if seen else np.zeros(8)
        )
        np.testing.assert_allclose(got[b, r, h], expected, atol=TOLERANCE[storage])


@pytest.mark.more
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(shapes=attention_cases.shapes(page_sizes=(128, 256)))
def test_tree_attention_is_near_float64_in_any_shape(backend, shapes):
    case = attention_cases.make(shapes)
    scratch = None
    if case.paths is not None:
        branches = np.concatenate([case.branch_k, case.branch_v], axis=-1)
        scratch = Scratch(jnp.asarray(branches), jnp.asarray(case.paths))
    pages = np.concatenate([case.k_pages, case.v_pages], axis=-1)
    arguments = map(jnp.asarray, (case.q, pages, case.table, case.visible))
    found = tree_attention(*arguments, scratch, backend=backend)
    atol = attention_cases.TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(found, attention_cases.expected(case), rtol=0, atol=atol)


def test_a_branch_sees_the_trunk_up_to_its_fork_and_the_tokens_on_its_path_only(backend):
    kv_heads, head_dim, trunk, entries, branches = 1, 8, 5, 3, 4
    k, v = _random((1, kv_heads, trunk, head_dim), 1), _random((1, kv_heads, trunk, head_dim), 2)
    shape = (1, kv_heads, entries, branches, head_dim)
    branch_k, branch_v = _random(shape, 3), _random(shape, 4)
    drafted = jnp.asarray(np.concatenate([branch_k, branch_v], axis=-1))
    paths = np.array([[[0, 0b1], [2, 0b111], [3, 0], [1, 0b101]]])
    visible = np.array([[3, 5, 4, 0]])  # forks at different depths of one trunk
    q = _random((1, 4, 2, head_dim), 5)
    got = tree_attention(
        jnp.asarray(q),
        _pages(k, v, jnp.float32, BLOCK, np.array([[0]])),
        Contiguous(),
        jnp.asarray(visible),
        Scratch(drafted, jnp.asarray(paths)),
        backend=backend,
    )
    for r, h in np.ndindex(4, 2):
        (branch, path), seen = paths[0, r], visible[0, r]
        on_path = np.s_[0, 0, attention_cases.entries_on(path), branch]
        keys = np.concatenate([k[0, 0, :seen], branch_k[on_path]])
        values = np.concatenate([v[0, 0, :seen], branch_v[on_path]])
        np.testing.assert_allclose(got[0, r, h], _one_query(q[0, r, h], keys, values), atol=2e-6)


NEAR_EDGES = attention_cases.Shapes(  # of pages and blocks
    visible=((0, 0, 0, 0), (300, 299, 302, 298), (128, 127, 129, 130)),
    kv_heads=2,
    head_dim=8,
    branches=4,
    entries=6,
    seed=1,
)
SINKS = jnp.asarray([1.0, -2.0, 0.0, 3.0])
VARIANTS = {
    "a window within a path, and sinks": AttentionVariant(window=3, sinks=SINKS),
    "a soft cap and a scale": AttentionVariant(soft_cap=1.5, scale=0.9),
    "a window that is an array": AttentionVariant(window=jnp.asarray(140), soft_cap=20.0),
}


def attend_case(case, variant, backend):
    pages, branches = (
        jnp.asarray(np.concatenate(pair, axis=-1))
        for pair in ((case.k_pages, case.v_pages), (case.branch_k, case.branch_v))
    )
    arguments = map(jnp.asarray, (case.q, np.nan_to_num(pages), case.table, case.visible))
    scratch = Scratch(branches, jnp.asarray(case.paths))
    return tree_attention(*arguments, scratch, variant=variant, backend=backend)


@pytest.mark.parametrize("name", VARIANTS)
def test_windows_caps_scales_and_sinks_are_those_of_float64(backend, name):
    case, variant = attention_cases.make(NEAR_EDGES), VARIANTS[name]
    found = attend_case(case, variant, backend)
    np.testing.assert_allclose(
        found, attention_cases.expected(case, variant), rtol=0, atol=TOLERANCE["float32"]
    )


@pytest.mark.more
def test_a_window_that_hides_nothing_changes_no_bit(backend):
    case = attention_cases.make(NEAR_EDGES)
    plain = attend_case(case, PLAIN, backend)
    for window in (1000, jnp.asarray(NOTHING)):
        wide = attend_case(case, AttentionVariant(window=window), backend)
        np.testing.assert_array_equal(wide, plain)


def test_pages_before_the_window_may_be_gone(backend):
    table = np.array([[0, 1, 2]])
    k, v = _random((1, 1, 3 * BLOCK, 8), 1), _random((1, 1, 3 * BLOCK, 8), 2)
    pages = _pages(k, v, jnp.float32, BLOCK, table)
    q, visible = jnp.asarray(_random((1, 2, 2, 8), 3)), jnp.array([[300, 0]])

    def attend(pages, table):
        variant = AttentionVariant(window=30)
        return tree_attention(
            q, pages, jnp.asarray(table), visible, variant=variant, backend=backend
        )

    expected = attend(pages, table)
    assert np.isfinite(expected).all()
    gone = pages.at[:2].set(jnp.nan)
    np.testing.assert_array_equal(attend(gone, np.array([[-1, 7, 2]])), expected)


@pytest.mark.parametrize(
    ("name", "value", "spoiled"),
    [
        ("table", 3, [True, False, True]),
        ("table", -1, [True, False, True]),
        ("visible", 3 * BLOCK, [True, False, False]),
        ("branch", 2, [True, False, False]),
        ("branch", -1, [True, False, False]),
        ("path", 0b101, [True, False, False]),
        ("path", -1, [True, False, False]),
    ],
)
def test_a_query_that_would_see_what_is_not_there_gets_nan(backend, name, value, spoiled):
    q, pages = jnp.asarray(_random((1, 3, 2, 8), 1)), jnp.asarray(_random((3, 1, BLOCK, 16), 2))
    kv = jnp.asarray(_random((1, 1, 2, 2, 16), 3))
    sound = {"table": [[0, 2]], "visible": [[2 * BLOCK, BLOCK, BLOCK + 1]]}
    sound |= {"branch": [[0, 1, 1]], "path": [[0b1, 0b11, 0]]}

    def attend(table, visible, branch, path):
        scratch = Scratch(kv, jnp.stack([branch, path], axis=-1))
        return np.asarray(tree_attention(q, pages, table, visible, scratch, backend=backend))

    arrays = {what: jnp.asarray(numbers) for what, numbers in sound.items()}
    place = (0, 1) if name == "table" else (0, 0)
    found = attend(**arrays | {name: arrays[name].at[place].set(value)})[0]
    expected = np.where(np.array(spoiled)[:, None, None], np.nan, attend(**arrays)[0])
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_branch_with_more_entries_than_a_path_has_bits_is_an_error(backend):
    scratch = Scratch(jnp.zeros((1, 1, 32, 2, 16)), jnp.zeros((1, 5, 2), jnp.int32))
    arguments = jnp.zeros((1, 5, 2, 8)), jnp.zeros((1, 1, BLOCK, 16)), Contiguous()
    with pytest.raises(ValueError, match="32 entries a branch: at most 31"):
        tree_attention(*arguments, jnp.ones((1, 5), jnp.int32), scratch, backend=backend)


@pytest.mark.more
@pytest.mark.shipped
def test_a_row_does_not_depend_on_how_long_its_neighbour_is(backend):
    table = np.array([[0], [1]])
    k, v = _random((2, 1, 500, 8), 1), _random((2, 1, 500, 8), 2)
    kv_pages = _pages(k, v, jnp.float32, 4 * BLOCK, table)
    q = jnp.asarray(_random((2, 3, 2, 8), 3))

    def first_row(neighbour):
        visible = jnp.array([[40, 41, 42], [neighbour] * 3])
        return tree_attention(q, kv_pages, Contiguous(), visible, backend=backend)[0]

    np.testing.assert_array_equal(first_row(1), first_row(500))
