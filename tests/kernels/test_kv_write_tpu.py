"""Writing keys and values by Pallas for TPUs, in the interpreter of JAX."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from ssd_jax.kernels import kv_write_tpu
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import Contiguous
from ssd_jax.kernels.kv_write_tpu import write_tpu
from tests.kernels.attention_cases import pack_kv

PARAMS = pltpu.InterpretParams(detect_races=True)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def write(pages, table, positions, k, v, *, interpret=PARAMS, **options):
    def call(*arguments):
        return write_tpu(*arguments, interpret=interpret, **options)

    positions = jnp.asarray(positions, jnp.int32)
    return np.asarray(jax.jit(call)(pages, table, positions, pack_kv(k, v)))


def expected(pages, table, positions, k, v):
    """One token after the other."""
    written = np.array(pages)
    new = np.asarray(pack_kv(k, v).astype(pages.dtype))
    table, size = np.asarray(table), pages.shape[2]
    for (b, r), at in np.ndenumerate(positions):
        if 0 <= at < table.shape[1] * size and 0 <= table[b, at // size] < len(written):
            written[table[b, at // size], :, at % size] = new[b, r]
    return written


def check(positions, page_size, *, head_dim=64, dtype=jnp.float32, pages_a_row=2, seed=0):
    positions = np.asarray(positions)
    batch, rows = positions.shape
    count = batch * pages_a_row + 1
    pages = normal(count, 2, page_size, 2 * head_dim, dtype=dtype)
    owned = np.random.default_rng(seed).permutation(count)[: batch * pages_a_row]
    table = jnp.asarray(owned.reshape(batch, pages_a_row), jnp.int32)
    k, v = (normal(batch, rows, 2, head_dim, seed=seed + i) for i in (1, 2))
    got = write(pages, table, positions, k, v)
    np.testing.assert_array_equal(got, expected(pages, table, positions, k, v))
    assert not interpreter.races.races_found


RUNS = {
    "a run over the edge of a page, one outside, one at the start": (
        [[30, 31, 32, 33], [62, 63, 64, 65], [0, 1, 2, 3]]
    ),
    "idle rows and padding": [[-1, -1, -1, -1], [7, 8, 64, 64], [99, 99, 99, 99]],
    "any order, and one position twice": [[50, 3, 17, 4], [3, 33, 3, 33], [63, 0, 31, 32]],
}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tokens_are_written_and_nothing_else_is(name, dtype):
    check(RUNS[name], 32, dtype=dtype)


def test_a_chunk_of_a_prompt_takes_several_steps():
    with mock.patch.object(kv_write_tpu, "_TOKENS", 16):
        check([list(range(27, 67)), [*range(64, 84), *[96] * 20]], 48)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    positions=st.integers(1, 20).flatmap(
        lambda rows: st.lists(
            st.lists(st.integers(-3, 100), min_size=rows, max_size=rows), min_size=1, max_size=3
        )
    ),
    page_size=st.sampled_from([16, 32, 48]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    tokens=st.sampled_from([8, 16, 128]),
)
def test_tokens_are_written_at_any_positions(positions, page_size, dtype, tokens):
    with mock.patch.object(kv_write_tpu, "_TOKENS", tokens):
        check(positions, page_size, dtype=dtype)


def test_values_that_are_not_numbers_stay_where_they_are():
    pages, table = jnp.zeros((1, 1, 16, 128)), jnp.zeros((1, 1), jnp.int32)
    k, v = jnp.ones((1, 3, 1, 64)), jnp.ones((1, 3, 1, 64))
    k, v = k.at[0, 1].set(jnp.nan), v.at[0, 2].set(jnp.inf)
    got = write(pages, table, [[4, 5, 16]], k, v)
    assert np.isnan(got[0, 0, 5, :64]).all()
    assert np.isfinite(np.delete(got, 5, axis=2)).all()


def test_half_vectors_are_padded_with_zeros():
    pages = jnp.zeros((3, 1, 16, 256))
    k, v = normal(2, 1, 1, 80, seed=1), normal(2, 1, 1, 80, seed=2)
    got = write(pages, Contiguous(1), [[2], [15]], k, v)
    np.testing.assert_array_equal(got[1, 0, 2, :80], k[0, 0, 0])
    np.testing.assert_array_equal(got[2, 0, 15, 128:208], v[1, 0, 0])
    assert np.count_nonzero(got) == 2 * 2 * 80


def test_a_page_that_there_is_not_is_not_written():
    pages = normal(2, 1, 16, 128)
    table, k = jnp.array([[2], [-1]]), normal(2, 1, 1, 64)
    np.testing.assert_array_equal(write(pages, table, [[0], [3]], k, k), pages)


def test_kv_writes_share_heads_on_eight_devices():
    pages, table = normal(2, 8, 16, 128), jnp.array([[1]])
    k, v = normal(1, 2, 8, 64, seed=1), normal(1, 2, 8, 64, seed=2)
    shards = HeadShards("model", mesh=Mesh(np.array(jax.devices()[:8]), ("model",)))
    got = write(pages, table, [[3, 9]], k, v, interpret=True, shards=shards)
    np.testing.assert_array_equal(got, expected(pages, table, np.array([[3, 9]]), k, v))
