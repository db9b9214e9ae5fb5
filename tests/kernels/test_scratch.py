"""Writing the keys and values of branch tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import Scratch

ROWS, HEADS, DEPTHS, BRANCHES, WIDTH = 2, 3, 4, 5, 8
NOWHERE = -1
ANCESTOR = [  # (branch, depth) of three queries a row
    [[0, 0], [4, 3], [2, NOWHERE]],
    [[3, 2], [4, NOWHERE], [1, 0]],
]


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("storage", [jnp.float32, jnp.bfloat16, jnp.uint16])
def test_each_token_goes_to_its_branch_and_depth_and_the_trunks_tokens_nowhere(storage, windows):
    """All else keeps its bits, also where bfloat16 is stored as bits."""
    rng = np.random.default_rng(0)
    shape = (ROWS, HEADS, DEPTHS, BRANCHES, WIDTH)

    def stored(values):
        return kv_pages.encode(jnp.asarray(values, jnp.float32), jnp.dtype(storage))

    before = Scratch(stored(rng.normal(size=shape)), jnp.array(ANCESTOR))
    new = rng.normal(size=(ROWS, 3, HEADS, WIDTH)).astype(np.float32)
    write = jax.jit(Scratch.write, static_argnames="windows")
    after = write(before, jnp.asarray(new), windows=windows)
    expected = np.array(before.kv)
    for row, query in np.ndindex(ROWS, 3):
        branch, depth = ANCESTOR[row][query]
        if depth != NOWHERE:
            expected[row, :, depth, branch] = stored(new[row, query])
    assert after.kv.dtype == storage
    np.testing.assert_array_equal(after.kv, expected)
    np.testing.assert_array_equal(after.ancestor, before.ancestor)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere bfloat16 is stored as such")
def test_cpu_writes_in_bit_storage_stay_in_place():
    """As of pages: a widened copy of all branches would cost more than the write."""
    shape = (4, 8, 8, 16, 64)
    stored = jax.ShapeDtypeStruct(shape, jnp.uint16)
    ancestor = jax.ShapeDtypeStruct((4, 16, 2), jnp.int32)
    new = jax.ShapeDtypeStruct((4, 16, 8, 64), jnp.float32)
    write = jax.jit(lambda kv, own, new: Scratch(kv, own).write(new), donate_argnums=0)
    memory = write.lower(stored, ancestor, new).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < np.prod(shape)
