"""Writing the keys and values of branch tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import Scratch

ROWS, HEADS, ENTRIES, BRANCHES, WIDTH = 2, 3, 31, 5, 8
NOWHERE = -1
PATHS = [  # (branch, path) of three queries a row, and the last entry of each
    [([0, 0b1], 0), ([4, 0b1011], 3), ([2, 0], NOWHERE)],
    [([3, 0b100], 2), ([4, 0], NOWHERE), ([1, 1 << 30 | 0b1], 30)],
]


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("storage", [jnp.float32, jnp.bfloat16, jnp.uint16])
def test_each_token_is_the_last_entry_on_its_path_and_the_trunks_tokens_are_nowhere(
    storage, windows
):
    """All else keeps its bits, also where bfloat16 is stored as bits."""
    rng = np.random.default_rng(0)
    shape = (ROWS, HEADS, ENTRIES, BRANCHES, WIDTH)

    def stored(values):
        return kv_pages.encode(jnp.asarray(values, jnp.float32), jnp.dtype(storage))

    before = Scratch(
        stored(rng.normal(size=shape)), jnp.array([[path for path, _ in row] for row in PATHS])
    )
    new = rng.normal(size=(ROWS, 3, HEADS, WIDTH)).astype(np.float32)
    write = jax.jit(Scratch.write, static_argnames="windows")
    after = write(before, jnp.asarray(new), windows=windows)
    expected = np.array(before.kv)
    for row, query in np.ndindex(ROWS, 3):
        (branch, _), entry = PATHS[row][query]
        if entry != NOWHERE:
            expected[row, :, entry, branch] = stored(new[row, query])
    assert after.kv.dtype == storage
    np.testing.assert_array_equal(after.kv, expected)
    np.testing.assert_array_equal(after.paths, before.paths)


def test_a_path_has_a_bit_an_entry_of_which_the_last_is_the_querys_own():
    depths = jnp.array([-1, 0, 1, 4, 30])
    chains = kv_pages.chain_path(depths + 1)
    np.testing.assert_array_equal(chains, [0, 0b1, 0b11, 0b11111, 2**31 - 1])
    np.testing.assert_array_equal(kv_pages.last_entry(chains), depths)
    np.testing.assert_array_equal(kv_pages.last_entry(jnp.array([0b1010, 0b1000])), [3, 3])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere bfloat16 is stored as such")
def test_cpu_writes_in_bit_storage_stay_in_place():
    """As of pages: a widened copy of all branches would cost more than the write."""
    shape = (4, 8, 8, 16, 64)
    stored = jax.ShapeDtypeStruct(shape, jnp.uint16)
    paths = jax.ShapeDtypeStruct((4, 16, 2), jnp.int32)
    new = jax.ShapeDtypeStruct((4, 16, 8, 64), jnp.float32)
    write = jax.jit(lambda kv, paths, new: Scratch(kv, paths).write(new), donate_argnums=0)
    memory = write.lower(stored, paths, new).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < np.prod(shape)
