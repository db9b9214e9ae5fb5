"""`tree_attention` in plain XLA: faults of a layout with keys beside values are caught."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.kv_pages import BLOCK, Contiguous, Scratch
from ssd_jax.kernels.tree_attention import xla
from ssd_jax.kernels.tree_attention.api import tree_attention
from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from tests.kernels import attention_cases
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
        "_attend", "blocks.end, add", "blocks.end - 1, add", ("xla_static", 128)
    ),
    "positions of smaller blocks": (
        "_attend", "start = block * blocks.size", "start = block * BLOCK", ("xla_static", 128)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    function, old, new, of = MUTANTS[name]
    with edited([Edit(xla, function, old, new)]), pytest.raises(AssertionError):
        check(*of)


VARIANT = AttentionVariant(window=3, soft_cap=1.5, sinks=jnp.asarray([1.0, -2.0]))
TREE = attention_cases.Shapes(  # windows that begin in the trunk and on a path
    visible=((9, 4, 9, 9, 6),), head_dim=8, branches=1, entries=6, seed=37
)


def check_variant():
    case = attention_cases.make(TREE)
    pages, branches = (
        jnp.asarray(np.nan_to_num(np.concatenate(pair, axis=-1)))
        for pair in ((case.k_pages, case.v_pages), (case.branch_k, case.branch_v))
    )
    arguments = jnp.asarray(case.q), pages, jnp.asarray(case.table), jnp.asarray(case.visible)
    scratch = Scratch(branches, jnp.asarray(case.paths))
    found = xla.tree_attention_xla(*arguments, scratch, VARIANT)
    expected = attention_cases.expected(case, VARIANT)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_a_tree_under_a_window_with_a_cap_and_sinks_is_near_float64():
    check_variant()


def test_the_static_form_reads_a_window_alone_and_gives_nan_to_who_would_see_more():
    rng = np.random.default_rng(0)
    q, pages = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((1, 2, 2, 8), (1, 1, 64 * BLOCK, 16))
    )
    variant, table = AttentionVariant(window=200), Contiguous()

    def attend(form):
        call = jax.jit(getattr(xla, f"tree_attention_{form}"))
        return lambda *visible: call(q, pages, table, jnp.asarray([visible]), None, variant)[0]

    found, wanted = attend("xla_static"), attend("xla")
    for visible in [(1, 2), (513, 514), (8192, 8191), (0, 5000)]:
        np.testing.assert_allclose(found(*visible), wanted(*visible), atol=2e-6)
    np.testing.assert_array_equal(np.isnan(found(8000, 400)).all(axis=(1, 2)), [True, False])


OF_VARIANTS = {
    "a window off by one in the trunk": ("first_seen", "count - self.window", "count - 4"),
    "a window that begins at the slot in the trunk": (
        "first_seen", "visible + jax.lax.population_count(scratch.paths[..., 1])", "visible"
    ),
    "a window off by one on a path": ("within", "> self.window", "> 4"),
    "a window by slot in place of position": (
        "within", "jax.lax.population_count(from_entry)", "(32 - jax.lax.clz(from_entry))"
    ),
    "a cap left out": ("cap", "self.soft_cap is None", "True"),
    "sinks ignored": ("tiled_sinks", "self.sinks is None", "True"),
    "sinks of other heads": (
        "tiled_sinks", "reshape(kv_heads, -1)", "reshape(kv_heads, -1)[:, ::-1]"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_VARIANTS)
def test_every_mutant_of_variants_is_caught(name):
    with edited([Edit(AttentionVariant, *OF_VARIANTS[name])]), pytest.raises(AssertionError):
        check_variant()
