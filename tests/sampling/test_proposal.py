"""A sparse q over the whole vocabulary, by a scatter and by a product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd_jax.kernels import sparse
from tests.sampling.edits import Edit, edited

WAYS = {"scatter": sparse.dense_by_scatter, "product": sparse.dense_by_product}


def q_of(vocab, seed, rows=3, count=16):
    """Support [rows, count], padded at any place, and q of any size."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(vocab)[:count] for _ in range(rows)])
    padding = rng.random(ids.shape) < 0.3
    support = np.where(padding, -1, ids).astype(np.int32)
    support[0, :2] = [0, vocab - 1]
    support[0, 2:][np.isin(support[0, 2:], [0, vocab - 1])] = -1
    q = rng.random(ids.shape) * 2.0 ** rng.integers(-60, 0, ids.shape)
    return support, np.where(support < 0, 0, q).astype(np.float32)


def expected(support, q, vocab):
    dense = np.zeros((len(q), vocab), np.float32)
    for row, (ids, values) in enumerate(zip(support, q, strict=True)):
        dense[row, ids[ids >= 0]] = values[ids >= 0]
    return dense


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(st.sampled_from([17, 511, 512, 513, 1024, 5000]), st.integers(0, 2**32 - 1))
def test_every_element_is_q_of_its_id_to_the_bit(way, vocab, seed):
    support, q = q_of(vocab, seed)
    np.testing.assert_array_equal(
        WAYS[way](support, q, vocab=vocab), expected(support, q, vocab), strict=True
    )


FLAWS = {
    "another place in a line": Edit(sparse, "dense_by_product", "support % _LINE", "support % 511"),
    "a product of bfloat16": Edit(
        sparse, "dense_by_product", "q[:, :, None]", "q.astype(jnp.bfloat16)[:, :, None]"
    ),
}


@pytest.mark.parametrize("name", FLAWS)
def test_planted_flaws_of_proposals_are_caught(name):
    support, q = q_of(5000, 1)
    with edited([FLAWS[name]]):
        found = sparse.dense_by_product(support, q, vocab=5000)
    assert not np.array_equal(found, expected(support, q, 5000))


def test_ids_that_do_not_exist_are_left_out():
    support, q = np.array([[7, 10, 600]], np.int32), np.full((1, 3), 0.25, np.float32)
    for way in WAYS.values():
        np.testing.assert_array_equal(way(support, q, vocab=10)[0, [7, 8, 9]], [0.25, 0, 0])


@pytest.mark.parametrize("support", [64, 128_256])
def test_a_product_is_chosen_only_where_its_factors_are_small(support):
    """On TPUs; a support may be the whole vocabulary."""
    structs = (jax.ShapeDtypeStruct((2, support), dtype) for dtype in (jnp.int32, jnp.float32))
    spread = jax.jit(lambda support, q: sparse.dense(support, q, 128_256))
    text = spread.trace(*structs).lower(lowering_platforms=("tpu",)).as_text()
    assert ("dot_general" in text, "scatter" in text) == (support == 64, support != 64)
