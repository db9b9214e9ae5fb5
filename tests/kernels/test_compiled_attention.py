"""The compiled `tree_attention`: near the reference at every shape, and a query's bits its own.

Queries of bfloat16 take another way than those of float32 where the processor has AMX tiles.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous, Scratch
from ssd_jax.kernels.tree_attention.api import tree_attention
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant
from tests.kernels.attention_cases import entries_on, random_paths, tree

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="no C++ compiler")

PAGES, ENTRIES, BRANCHES = 5, 7, 6
STORAGE = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "bfloat16 bits": jnp.uint16}
QUERIES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def normal(shape, seed):
    values = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


def stored(shape, seed, storage="bfloat16 bits"):
    return kv_pages.encode(normal(shape, seed), jnp.dtype(STORAGE[storage]))


compiled = jax.jit(tree_attention, static_argnames=("backend", "kernels"))


def attend(*arguments, backend="cpu", kernels=None, variant=PLAIN):
    call = compiled(*arguments, backend=backend, kernels=kernels, variant=variant)
    return np.asarray(call)


def case(batch, rows, heads, kv_heads, head_dim, storage="bfloat16 bits", *, branches=False):
    """Arguments of a call; every row of the batch has two pages, queries see any part of them."""
    rng = np.random.default_rng(rows)
    scratch = None
    if branches:
        drafted = (batch, kv_heads, ENTRIES, BRANCHES, 2 * head_dim)
        paths = random_paths(rng, (batch, rows, BRANCHES), ENTRIES)
        scratch = Scratch(stored(drafted, 4, storage), jnp.asarray(paths))
    return (
        normal((batch, rows, heads, head_dim), 1),
        stored((PAGES, kv_heads, 2 * BLOCK, 2 * head_dim), 2, storage),
        jnp.asarray(rng.integers(0, PAGES, (batch, 2)), jnp.int32),
        jnp.asarray(rng.integers(0, 4 * BLOCK + 1, (batch, rows)), jnp.int32),
        scratch,
    )


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 9, 3, 64), (2, 5, 9, 3, 64), (3, 16, 2, 2, 8), (1, 40, 2, 1, 128), (2, 3, 8, 2, 33)],
    ids=str,
)
def test_compiled_attention_is_near_the_reference(sizes, storage, branches):
    arguments = case(*sizes, storage, branches=branches)
    expected = attend(*arguments, backend="reference")
    atol = 2e-2 if storage == "bfloat16" else 2e-6  # the reference multiplies bfloat16 pages so
    np.testing.assert_allclose(attend(*arguments), expected, atol=atol)


def variant_of(window, heads, soft_cap=1.5):
    sinks = jnp.linspace(-2, 2, heads)
    return AttentionVariant(window=jnp.asarray(window), soft_cap=soft_cap, scale=0.3, sinks=sinks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("soft_cap", [1.5, 50.0])
def test_windows_caps_scales_and_sinks_are_near_the_reference(dtype, soft_cap):
    q, *others = case(2, 40, 9, 3, 64, branches=True)
    q = q.astype(dtype)
    for window in (1, 3, 63, 64, 65, 200):
        variant = variant_of(window, 9, soft_cap)
        expected = attend(q.astype(jnp.float32), *others, backend="reference", variant=variant)
        np.testing.assert_allclose(attend(q, *others, variant=variant), expected, atol=2e-5)


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 5, 9, 3, 64), (1, 40, 2, 1, 128), (3, 2, 4, 2, 32), (1, 7, 2, 2, 24)], ids=str
)
def test_bfloat16_queries_are_taken_as_they_are(sizes, branches):
    q, *others = case(*sizes, branches=branches)
    q = q.astype(jnp.bfloat16)
    expected = attend(q.astype(jnp.float32), *others, backend="reference")
    np.testing.assert_allclose(attend(q, *others), expected, atol=2e-5)


def test_scores_far_apart_leave_one_value_and_nothing_seen_leaves_zeros():
    q, kv, table, _, _ = case(1, 2, 1, 1, 64, "float32")
    kv = kv.at[table[0, 0], 0, 77, :64].set(1000 * q[0, 0, 0])
    found = attend(q, kv, table, jnp.asarray([[300, 0]]))
    np.testing.assert_array_equal(found[0, 0, 0], kv[table[0, 0], 0, 77, 64:])
    np.testing.assert_array_equal(found[0, 1, 0], np.zeros(64))


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("storage", ["float32", "bfloat16 bits"])
@QUERIES
def test_a_querys_bits_do_not_depend_on_what_runs_beside_it(dtype, storage, branches):
    q, kv, table, visible, scratch = case(3, 40, 6, 2, 64, storage, branches=branches)
    q = q.astype(dtype)
    full = attend(q, kv, table, visible, scratch)
    for row, first, many in [(0, 0, 1), (1, 3, 2), (2, 17, 5), (2, 39, 1), (1, 8, 23)]:
        rows, queries = slice(row, row + 1), slice(first, first + many)
        known = None
        if scratch is not None:
            known = Scratch(scratch.kv[rows], scratch.paths[rows, queries])
        part = attend(q[rows, queries], kv, table[rows], visible[rows, queries], known)
        np.testing.assert_array_equal(part, full[rows, queries])


@pytest.mark.parametrize("variant", [PLAIN, variant_of(62, 9)], ids=["plain", "window"])
@QUERIES
def test_a_block_of_tokens_is_its_tokens_one_by_one(dtype, variant):
    """As verification and plain decoding see them: each one position more than the one before."""
    q, kv, table, _, _ = case(1, 9, 9, 3, 64)
    q = q.astype(dtype)
    for length in (1, 60, 96, 250):
        visible = length + jnp.arange(9)[None]
        full = attend(q, kv, table, visible, variant=variant)
        for token in range(9):
            alone = q[:, token : token + 1], kv, table, visible[:, token : token + 1]
            one = attend(*alone, variant=variant)
            np.testing.assert_array_equal(one[:, 0], full[:, token])


def test_a_table_and_contiguous_pages_give_the_same_bits():
    q, kv, _, visible, _ = case(2, 3, 4, 2, 64)
    visible = visible // 2
    table = attend(q, kv, jnp.asarray([[2], [3]]), visible)
    np.testing.assert_array_equal(attend(q, kv, Contiguous(2), visible), table)


@pytest.mark.parametrize(
    ("dtype", "storage", "windows"),
    [
        ("float32", "float32", ()),
        ("float32", "bfloat16 bits", ()),
        ("bfloat16", "bfloat16 bits", ()),
        ("bfloat16", "bfloat16 bits", (2, 64, 100)),
    ],
)
def test_a_token_of_a_tree_attends_bit_for_bit_as_if_its_path_were_in_the_pages(
    dtype, storage, windows
):
    """At the edges of blocks of positions, where a path goes on in the next block or begins one."""
    heads, kv_heads, head_dim, nodes, branches = 6, 2, 64, 31, 2
    rng = np.random.default_rng(0)
    q = normal((1, nodes, heads, head_dim), 1).astype(dtype)
    pages = stored((1, kv_heads, 2 * BLOCK, 2 * head_dim), 2, storage)
    kv = stored((1, kv_heads, nodes, branches, 2 * head_dim), 3, storage)
    drafted = np.asarray(kv)[0, :, :, 1]
    trunks = (*range(4), *range(62, 67), *range(126, 131))
    variants = [variant_of(window, heads) for window in windows] or [PLAIN]
    for trunk, variant in itertools.product(trunks, variants):
        attend_exactly = functools.partial(attend, kernels=Kernels(tiles=False), variant=variant)
        paths = np.array(tree(rng, nodes))
        branch_and_path = jnp.asarray(np.stack([np.ones_like(paths), paths], axis=-1), jnp.int32)
        in_tree = attend_exactly(
            q, pages, Contiguous(), jnp.full((1, nodes), trunk), Scratch(kv, branch_and_path[None])
        )
        in_pages = np.repeat(np.asarray(pages), nodes, axis=0)
        for node, path in enumerate(paths):
            on_path = drafted[:, entries_on(path)]
            in_pages[node, :, trunk : trunk + on_path.shape[1]] = on_path
        length = trunk + np.array([len(entries_on(path)) for path in paths])
        expected = attend_exactly(
            q.swapaxes(0, 1), jnp.asarray(in_pages), Contiguous(), jnp.asarray(length)[:, None]
        )
        np.testing.assert_array_equal(in_tree[0], expected[:, 0])
        last = Scratch(kv, branch_and_path[None, -1:])
        alone = attend_exactly(q[:, -1:], pages, Contiguous(), jnp.full((1, 1), trunk), last)
        np.testing.assert_array_equal(alone[0], in_tree[0, -1:])


@pytest.mark.parametrize("window", [None, 3])
@QUERIES
def test_what_a_query_does_not_see_may_be_nan(dtype, window):
    storage = "float32" if dtype == jnp.float32 else "bfloat16"
    q, kv, _, _, scratch = case(1, 6, 3, 1, 64, storage, branches=True)
    q = q.astype(dtype)
    visible = np.array([[0, 1, 63, 64, 130, 131]])
    paths = np.array([[[0, 0], [1, 0b1], [1, 0b101], [2, 0b1001110], [3, 0b10], [4, 0]]])
    scratch = scratch._replace(paths=jnp.asarray(paths))
    variant = AttentionVariant(window=window)
    clean = attend(q, kv, Contiguous(), jnp.asarray(visible), scratch, variant=variant)
    assert np.isfinite(clean).all()
    for query, (branch, path) in enumerate(paths[0]):
        drafted, on_path = np.zeros((ENTRIES, BRANCHES), bool), entries_on(path)
        last, hidden = visible[0, query] + len(on_path), 0
        if window is not None:
            hidden = max(last - window, 0)
        seen = (np.arange(2 * BLOCK) < visible[0, query]) & (np.arange(2 * BLOCK) >= hidden)
        drafted[on_path[max(hidden - visible[0, query], 0) :], branch] = True
        dirty = attend(
            q,
            jnp.where(seen[:, None], kv, jnp.nan),
            Contiguous(),
            jnp.asarray(visible),
            Scratch(jnp.where(drafted[..., None], scratch.kv, jnp.nan), scratch.paths),
            variant=variant,
        )
        np.testing.assert_array_equal(dirty[0, query], clean[0, query])


def test_arrays_that_compiled_attention_cannot_read_are_refused():
    q, kv, table, visible, scratch = case(1, 1, 2, 1, 8, branches=True)
    wide = scratch._replace(kv=scratch.kv.astype(jnp.float32))
    for arguments, why in [
        ((q, kv[:, :, :100], table, visible), "page_size is no multiple of 64"),
        ((q, jnp.tile(kv, 2), table, visible), "pages are not keys beside values of q's size"),
        ((q.astype(jnp.float16), kv, table, visible), "q is neither float32 nor bfloat16"),
        ((q, kv.astype(jnp.float16), table, visible), "pages are neither float32 nor bfloat16"),
        ((q, kv, table, visible, wide), "branches are not stored as pages are"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=why):
            attend(*arguments)
