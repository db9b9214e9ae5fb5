"""Attention by Pallas for GPUs: in the interpreter of JAX, and on a GPU where there is one."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from jax.sharding import Mesh

from ssd_jax import compat
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import Contiguous, Scratch
from tests.kernels import attention_cases as cases
from tests.kernels.attention_cases import Shapes, expected, hide_unseen, make

OLD = compat.why_no_mosaic_gpu()
if OLD is not None:
    pytest.skip(f"attention by Mosaic GPU: {OLD}", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from ssd_jax.kernels.tree_attention import pallas_gpu, pallas_gpu_kernel  # noqa: E402
from ssd_jax.kernels.tree_attention.xla import tree_attention_xla  # noqa: E402

HOW = [
    pytest.param(plgpu.InterpretGPUParams(), marks=pytest.mark.aot, id="interpreted"),
    pytest.param(None, marks=[pytest.mark.gpu, pytest.mark.shipped], id="gpu"),
]
everywhere = pytest.mark.parametrize("interpret", HOW)
SETTINGS = settings(max_examples=4, deadline=None, derandomize=True, database=None)

EDGES = Shapes(  # empty rows, rows that end at edges of pages and blocks, more pages than one block
    visible=((0, 0, 0), (300, 256, 1), (128, 127, 129), (0, 0, 0), (64, 65, 63)),
    kv_heads=2,
    page_size=64,
    branches=4,
    depths=3,
    dtype="bfloat16",
    seed=1,
)
TREE = Shapes(  # more queries than one tile
    visible=(tuple(range(100, 148, 2)),),
    group=4,
    head_dim=128,
    branches=24,
    depths=4,
    dtype="bfloat16",
    seed=2,
)

WIDE = Shapes(  # more tiles than a block of the grid has, and one that is padding
    visible=(tuple(range(100, 170)),),
    group=4,
    page_size=64,
    branches=2,
    depths=1,
    dtype="bfloat16",
    seed=3,
)


@pytest.fixture(autouse=True)
def _where_it_runs(request):
    if request.node.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@cases.st.composite
def shapes(draw):
    found = draw(cases.shapes(page_sizes=(64, 128, 256)))
    size = draw(cases.st.sampled_from(pallas_gpu.HEAD_DIMS))
    return cases.dataclasses.replace(found, head_dim=size, dtype="bfloat16")


def attend(case, interpret, *, page_table=None, parts=None, shards=None):
    pages = jnp.concatenate([case.k_pages, case.v_pages], axis=-1)
    scratch = None
    if case.ancestor is not None:
        branches = np.concatenate([case.branch_k, case.branch_v], axis=-1)
        scratch = Scratch(jnp.asarray(branches), jnp.asarray(case.ancestor))
    table = jnp.asarray(case.table) if page_table is None else page_table

    def call(*arguments):
        how = {"interpret": interpret, "parts": parts, "shards": shards}
        return pallas_gpu.tree_attention_pallas_gpu(*arguments, **how)

    arguments = jnp.asarray(case.q), pages, table, jnp.asarray(case.visible), scratch
    return np.asarray(jax.jit(call)(*arguments))


def check(shape, interpret, **options):
    case = hide_unseen(make(shape))
    got = attend(case, interpret, **options)
    np.testing.assert_allclose(got, expected(case), rtol=0, atol=cases.TOLERANCE["bfloat16"])


@everywhere
@SETTINGS
@given(shapes())
@example(TREE)
def test_it_is_near_float64(interpret, shape):
    check(shape, interpret, parts=2)


@everywhere
@pytest.mark.parametrize("parts", [1, 3, 47, None])
def test_parts_of_a_prefix_make_one_softmax(interpret, parts):
    check(EDGES, interpret, parts=parts)


@everywhere
def test_one_page_a_row_needs_no_table(interpret):
    case = make(Shapes(visible=((200,), (3,)), page_size=384, seed=4, dtype="bfloat16"))
    for pages in case[1:3]:
        pages[:] = np.nan_to_num(pages)
    own = case._replace(table=np.array([[1], [2]], np.int32))
    got = attend(own, interpret, page_table=Contiguous(1))
    np.testing.assert_allclose(got, expected(own), rtol=0, atol=cases.TOLERANCE["bfloat16"])


@everywhere
def test_only_queries_that_see_a_wrong_page_are_nan(interpret):
    case = make(Shapes(visible=((5, 70), (64, 64)), page_size=64, dtype="bfloat16"))
    case.table[0, 1] = 99
    np.testing.assert_array_equal(
        np.isnan(attend(case, interpret)).all(axis=(2, 3)), [[False, True], [False, False]]
    )


@everywhere
def test_queries_are_more_than_the_tiles_of_a_block_of_the_grid(interpret):
    check(WIDE, interpret)


@everywhere
@pytest.mark.parametrize(("queries", "head_dim"), [(25, 128), (45, 64)], ids=["2 tiles", "3"])
def test_all_tiles_have_read_a_slot_before_it_is_filled_again(interpret, queries, head_dim):
    visible = (tuple(range(640, 640 + queries)),)
    shape = dataclasses.replace(WIDE, visible=visible, depths=40, head_dim=head_dim)
    check(shape, interpret, parts=1)


@everywhere
@pytest.mark.parametrize("parts", [3, None])
def test_a_query_gives_the_same_bits_beside_others(interpret, parts):
    """At the edges of blocks, from which on those beside it see one more."""
    lengths = (1, 63, 64, 65, 126, 127, 128, 129, 191, 192, 193, 255, 256)
    shape = Shapes(visible=((320,) * 5,), page_size=64, dtype="bfloat16", seed=6)
    case = make(shape)
    for length in lengths:
        among = length + np.arange(5, dtype=np.int32)[None]
        several = attend(case._replace(visible=among), interpret, parts=parts)
        alone = case._replace(q=case.q[:, :1], visible=among[:, :1])
        np.testing.assert_array_equal(attend(alone, interpret, parts=parts), several[:, :1])


def test_each_of_eight_devices_attends_for_its_heads(monkeypatch):
    """With XLA in the kernel's place: JAX interprets a kernel on one device at a time."""

    def attend_here(q, pages, table, visible, branches, ancestor, **_how):
        assert (q.shape[2], pages.shape[1], branches.shape[1]) == (2, 1, 1)
        return tree_attention_xla(q, pages, table, visible, Scratch(branches, ancestor))

    monkeypatch.setattr(pallas_gpu, "_attend", attend_here)
    shape = Shapes(visible=((130, 7),), kv_heads=8, branches=2, depths=2, dtype="bfloat16")
    case = hide_unseen(make(shape))
    shards = HeadShards("model", mesh=Mesh(np.array(jax.devices()[:8]), ("model",)))
    got = attend(case, None, shards=shards)
    np.testing.assert_allclose(got, expected(case), rtol=0, atol=cases.TOLERANCE["bfloat16"])


MUTANTS = {
    "a position too many": (
        "column < lax.broadcast_in_dim(behind",
        "column <= lax.broadcast_in_dim(behind",
    ),
    "blocks that are taken for seen": ("lax.div(whole[b], block)", "lax.div(limit, block)"),
    "what nobody sees stays": ("row < inside, v", "row < block, v"),
    "a sum that keeps the scale of an earlier maximum": ("sums * kept + w", "sums + w"),
    "an output that does": ("added * lax.broadcast_in_dim(kept, added.shape, [0])", "added"),
    "parts that overlap": (
        "return (part + index * parts) * block",
        "return (part + index) * block",
    ),
    "a part without its last block": ("blocks - part + (parts - 1)", "blocks - part"),
    "tiles of the first group": ('lax.axis_index("tile") * tiles', "0 * tiles"),
    "the slot of the next block": (
        "copy_gmem_to_smem(v, v_shared.at[slot]",
        "copy_gmem_to_smem(v, v_shared.at[lax.rem(slot + 1, SLOTS)]",
    ),
    "keys of the first block": ("k_shared.at[slot].transpose", "k_shared.at[0].transpose"),
    "branches in every part": ("part == parts - 1", "part >= 0"),
    "keys for values": ("pl.ds(head_dim, head_dim)", "pl.ds(0, head_dim)"),
    "queries of the first tile": ("* tiles + thread) * ROWS", "* tiles) * ROWS"),
    "the tokens of other branches": ("its_branch == lax", "its_branch != lax"),
    "a branch without its last token": ("its_depth <= lax", "its_depth < lax"),
}


@pytest.mark.aot
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, monkeypatch):
    old, new = MUTANTS[name]
    path = Path(pallas_gpu_kernel.__file__)
    text = path.read_text()
    assert text.count(old) == 1, "an edit must fit the source exactly once"
    mutant = dict(vars(pallas_gpu_kernel))
    exec(compile(text.replace(old, new), f"{path} mutant", "exec"), mutant)
    monkeypatch.setattr(pallas_gpu, "kernel", mutant["kernel"])
    shape = WIDE if "group" in name else TREE if "tile" in name else EDGES
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(shape, plgpu.InterpretGPUParams(), parts=2)


def test_pages_and_devices_that_it_lacks():
    def pages(size=128, width=128, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, 1, size, width), dtype)

    assert pallas_gpu.why_not(64, pages()) is None
    assert "head_dim = 80 in pages of width 160: it needs 64 or 128" in pallas_gpu.why_not(
        80, pages(width=160)
    )
    assert pallas_gpu.why_not(64, pages(48)) == "page_size = 48: it needs a multiple of 64"
    assert pallas_gpu.why_not(64, pages(dtype=jnp.float32)) == "pages of float32: it needs bfloat16"
    with pytest.raises(ValueError, match="does not take page_size = 48"):
        attend(make(Shapes(visible=((5,),), page_size=48, dtype="bfloat16")), None)
    assert "compute capability none: it needs 9.0" in pallas_gpu.why_not_on(jax.devices("cpu")[0])
