"""`tree_attention` in plain XLA: faults of a layout with keys beside values are caught."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.kv_pages import BLOCK, Contiguous, Scratch
from ssd_jax.kernels.tree_attention import xla
from ssd_jax.kernels.tree_attention.api import tree_attention
from tests.sampling.edits import Edit, edited

FORMS = ("xla", "xla_static")
SIZES = (64, 128)  # of heads: less than the lanes of a TPU's register, and as many


def case(head_dim, positions=6 * BLOCK):
    """q, pages of two rows, and two branches of two tokens that leave the trunk."""
    rng = np.random.default_rng(head_dim)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    scratch = Scratch(normal(2, 1, 2, 2, 2 * head_dim), jnp.array([[[0, 1], [1, 0], [0, -1]]] * 2))
    visible = jnp.array([[0, 5, BLOCK], [positions, positions - 1, 4 * BLOCK + 1]])
    pages = normal(3, 1, positions, 2 * head_dim)
    return normal(2, 3, 2, head_dim), pages, Contiguous(1), visible, scratch


def check(form, head_dim):
    arguments = case(head_dim)
    expected = tree_attention(*arguments, backend="reference")
    found = getattr(xla, f"tree_attention_{form}")(*arguments)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", SIZES)
def test_xla_attention_is_near_the_reference(form, head_dim):
    check(form, head_dim)


@pytest.mark.parametrize("positions", [BLOCK, 3 * BLOCK, 8 * BLOCK])
def test_only_the_static_form_has_no_loop_of_unknown_length(positions):
    for form in FORMS:
        traced = jax.make_jaxpr(getattr(xla, f"tree_attention_{form}"))(*case(64, positions))
        assert ("while[" in str(traced)) == (form == "xla")


MUTANTS = {
    "keys and values exchanged": ("_accumulate", "k, v =", "v, k =", ("xla", 64)),
    "a query beside its value": (
        "_attend", "(0, head_dim)))", "(head_dim, 0)))", ("xla_static", 64)
    ),
    "sums of keys": (
        "_attend", "output[..., -head_dim:]", "output[..., :head_dim]", ("xla_static", 64)
    ),
    "the last block left out": (
        "_attend", "(0, blocks, add", "(0, blocks - 1, add", ("xla_static", 128)
    ),
    "positions of smaller blocks": (
        "_attend", "block * block_size +", "block * BLOCK +", ("xla_static", 128)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    function, old, new, of = MUTANTS[name]
    with edited([Edit(xla, function, old, new)]), pytest.raises(AssertionError):
        check(*of)
