"""Writing and reading key/value pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous
from ssd_jax.kernels.tree_attention.xla import tree_attention_xla

WRITES = pytest.mark.parametrize("windows", [False, True], ids=["scatter", "windows"])


def _values(batch, rows):
    return jnp.arange(batch * rows * 2 * 4, dtype=jnp.float32).reshape(batch, rows, 2, 4) + 1


@pytest.mark.parametrize("table", [Contiguous(1), jnp.array([[1], [2]])])
@WRITES
def test_tokens_outside_the_pages_are_not_written(table, windows):
    pages = jnp.zeros((3, 2, BLOCK, 4))
    positions = jnp.array([[BLOCK - 2, BLOCK - 1, BLOCK], [-1, 5, 10**6]])
    written = kv_pages.write(pages, table, positions, _values(2, 3), windows=windows)
    touched = np.argwhere(np.asarray(written).any(axis=(1, 3))).tolist()
    assert touched == [[1, BLOCK - 2], [1, BLOCK - 1], [2, 5]]
    np.testing.assert_array_equal(written[2, :, 5], _values(2, 3)[1, 1])


@WRITES
def test_a_write_may_cross_a_page_boundary(windows):
    pages = jnp.zeros((4, 2, BLOCK, 4))
    written = kv_pages.write(
        pages, jnp.array([[3, 1]]), jnp.array([[BLOCK - 1, BLOCK]]), _values(1, 2), windows=windows
    )
    np.testing.assert_array_equal(written[3, :, BLOCK - 1], _values(1, 2)[0, 0])
    np.testing.assert_array_equal(written[1, :, 0], _values(1, 2)[0, 1])
    block = kv_pages.read_block(written, jnp.array([[3, 1]]), jnp.array(1), 1)
    np.testing.assert_array_equal(block[0], written[1])


def test_bfloat16_survives_its_bit_storage():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.bfloat16)
    assert kv_pages.storage_dtype(jnp.dtype(jnp.bfloat16), "cpu") == jnp.uint16
    np.testing.assert_array_equal(
        kv_pages.decode(kv_pages.encode(x, jnp.dtype(jnp.uint16))), x.astype(jnp.float32)
    )


def test_layers_of_one_array_have_their_own_pages():
    layer = jnp.array(2)
    assert int(kv_pages.layer_page_table(Contiguous(1), layer, 5).first) == 11
    np.testing.assert_array_equal(
        kv_pages.layer_page_table(jnp.array([[0, 4]]), layer, 5), [[10, 14]]
    )


def test_cpu_writes_in_bit_storage_stay_in_place():
    """A widened copy of the pages would cost milliseconds a layer on CPU."""
    pages = jax.ShapeDtypeStruct((2, 3, 1024, 64), jnp.uint16)
    positions = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    values = jax.ShapeDtypeStruct((2, 1, 3, 64), jnp.float32)
    write = jax.jit(lambda p, at, v: kv_pages.write(p, Contiguous(), at, v), donate_argnums=0)
    compiled = write.lower(pages, positions, values).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 3 * 1024 * 64


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_token_without_numbers_shows_to_queries_that_see_it_alone(which, value):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 1, 16, 1, 8), np.float32)
    healthy = np.concatenate([k, v], axis=-1)
    {"key": k, "value": v}[which][0, 9, 0, 3] = value
    kv = jnp.concatenate(kv_pages.contain_nonfinite(jnp.asarray(k), jnp.asarray(v)), axis=-1)
    q = jnp.ones((1, 2, 1, 8))
    table, visible = jnp.zeros((1, 1), jnp.int32), jnp.array([[9, 10]])

    def attend(entries):
        pages = jnp.asarray(entries).transpose(0, 2, 1, 3)
        return np.asarray(tree_attention_xla(q, pages, table, visible))[0]

    found, wanted = attend(kv), attend(healthy)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert np.isnan(found[1]).all()
