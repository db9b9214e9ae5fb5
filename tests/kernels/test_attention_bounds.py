"""What attention's arguments must be."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from ssd_jax.kernels.kv_pages import Contiguous, Scratch
from ssd_jax.kernels.tree_attention.api import tree_attention
from ssd_jax.kernels.tree_attention.bounds import check_shapes
from ssd_jax.kernels.tree_attention.variant import AttentionVariant


def arguments(**changes):
    shapes = {"q": (2, 3, 4, 8), "pages": (5, 2, 64, 16), "table": (2, 2), "visible": (2, 3)}
    shapes |= {"kv": (2, 2, 2, 2, 16), "paths": (2, 3, 2)}
    made = {name: jnp.zeros(shape, jnp.int32) for name, shape in (shapes | changes).items()}
    scratch = Scratch(made.pop("kv"), made.pop("paths"))
    return *made.values(), scratch


def test_shapes_that_fit_are_taken():
    q, pages, table, visible, scratch = arguments()
    for rows in (table, Contiguous(3)):
        check_shapes(q, pages, rows, visible, scratch)
    check_shapes(q, pages, table, visible, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 3, 5, 8)}, "5 query heads are no multiple of 2 key/value heads"),
        ({"q": (2, 3, 4, 16)}, "pages of width 16 have no keys beside values of head_dim = 16"),
        ({"table": (1, 2)}, r"page_table \(1, 2\) has not 2 rows"),
        ({"visible": (2, 4)}, r"visible \(2, 4\) is not \(2, 3\)"),
        ({"kv": (2, 1, 2, 2, 16)}, r"branches \(2, 1, 2, 2, 16\) are not \(2, 2, 2, 2, 16\)"),
        ({"paths": (2, 4, 2)}, r"paths \(2, 4, 2\) are not \(2, 3, 2\)"),
        ({"kv": (2, 2, 32, 2, 16)}, "32 entries a branch: at most 31"),
    ],
)
def test_shapes_that_do_not_fit_are_errors_with_limits(changes, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(*arguments(**changes))


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"window": 0}, "window = 0 is not above 0"),
        ({"soft_cap": 0.0}, r"soft_cap = 0\.0 is not above 0"),
        ({"scale": float("nan")}, "scale = nan is not above 0"),
        ({"sinks": jnp.zeros(2)}, r"sinks \(2,\) are not \(4,\)"),
    ],
)
def test_variants_that_make_no_sense_are_errors(variant, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(*arguments(), AttentionVariant(**variant))


def test_positions_behind_the_reach_are_not_read_and_who_would_see_them_gets_nan():
    rng = np.random.default_rng(1)
    q, pages = (
        jnp.asarray(rng.standard_normal(shape, np.float32))
        for shape in ((1, 2, 2, 8), (1, 1, 1024, 16))
    )
    visible = jnp.array([[512, 513]])

    def attend(pages, reach):
        table = Contiguous(reach=reach)
        return np.asarray(tree_attention(q, pages, table, visible, backend="xla_static"))[0]

    found = attend(pages.at[:, :, 512:].set(jnp.nan), 512)
    np.testing.assert_allclose(found[0], attend(pages, None)[0], atol=2e-6)
    assert np.isnan(found[1]).all()
