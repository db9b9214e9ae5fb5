"""Attention by Pallas for GPUs: in the interpreter of JAX, and on a GPU where there is one."""

import dataclasses
import functools
import sys
import types
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
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant
from tests.kernels import attention_cases as cases
from tests.kernels.attention_cases import Shapes, expected, hide_unseen, make

OLD = compat.why_no_mosaic_gpu()
if OLD is not None:
    pytest.skip(f"attention by Mosaic GPU: {OLD}", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from ssd_jax.kernels.tree_attention import (  # noqa: E402
    pallas_gpu,
    pallas_gpu_mma,
    pallas_gpu_part,
    pallas_gpu_wgmma,
)
from ssd_jax.kernels.tree_attention.xla import tree_attention_xla  # noqa: E402

INTERPRETED = plgpu.InterpretGPUParams()
HOW = [
    pytest.param(name, interpret, marks=marks, id=f"{name}-{where}")
    for name in pallas_gpu.KERNELS
    for interpret, marks, where in [
        (INTERPRETED, [pytest.mark.aot], "interpreted"),
        (None, [pytest.mark.gpu, pytest.mark.shipped], "gpu"),
    ]
]
MANY = pytest.param(47, marks=pytest.mark.slow)
"""Parts, most of which are empty; an interpreter takes a minute or two."""
everywhere = pytest.mark.parametrize(("name", "interpret"), HOW)
SETTINGS = settings(max_examples=4, deadline=None, derandomize=True, database=None)

EDGES = Shapes(  # empty rows, rows that end at edges of pages and blocks, more pages than one block
    visible=((0, 0, 0), (300, 256, 1), (128, 127, 129), (0, 0, 0), (64, 65, 63)),
    kv_heads=2,
    page_size=64,
    branches=4,
    entries=3,
    dtype="bfloat16",
    seed=1,
)
TREE = Shapes(  # more queries than one tile
    visible=(tuple(range(100, 148, 2)),),
    group=4,
    head_dim=128,
    branches=24,
    entries=4,
    dtype="bfloat16",
    seed=2,
)

WIDE = Shapes(  # more tiles than a block of the grid has, and one that is padding
    visible=(tuple(range(100, 170)),),
    group=4,
    page_size=64,
    branches=2,
    entries=1,
    dtype="bfloat16",
    seed=3,
)

WIDE_HEADS = dataclasses.replace(  # two tiles, and more blocks than there are slots
    TREE, visible=(tuple(range(200, 225)),), page_size=64, head_dim=256, branches=3, seed=7
)


@pytest.fixture(autouse=True)
def _where_it_runs(request):
    if request.node.get_closest_marker("gpu"):
        if jax.default_backend() != "gpu":
            pytest.skip("no GPU")
        name = request.node.callspec.params["name"]
        reason = pallas_gpu.why_not_on(jax.devices()[0], name)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")


@cases.st.composite
def shapes(draw):
    found = draw(cases.shapes(page_sizes=(64, 128, 256)))
    size = draw(cases.st.sampled_from(pallas_gpu.HEAD_DIMS))
    return cases.dataclasses.replace(found, head_dim=size, dtype="bfloat16")


def attend(case, name, interpret, variant=PLAIN, *, page_table=None, parts=None, shards=None):
    pages = jnp.concatenate([case.k_pages, case.v_pages], axis=-1)
    scratch = None
    if case.paths is not None:
        branches = np.concatenate([case.branch_k, case.branch_v], axis=-1)
        scratch = Scratch(jnp.asarray(branches), jnp.asarray(case.paths))
    table = jnp.asarray(case.table) if page_table is None else page_table
    arguments = jnp.asarray(case.q), pages, table, jnp.asarray(case.visible), scratch, variant
    return np.asarray(compiled(name, interpret is not None, parts, shards)(*arguments))


@functools.cache
def compiled(name, interpreted, parts, shards):
    launch = pallas_gpu.Launch(name, parts, INTERPRETED if interpreted else None)
    call = functools.partial(pallas_gpu.tree_attention_pallas_gpu, shards=shards, launch=launch)
    return jax.jit(call)


def check(shape, name, interpret, variant=PLAIN, **options):
    case = hide_unseen(make(shape))
    got = attend(case, name, interpret, variant, **options)
    tolerance = cases.TOLERANCE["bfloat16"]
    np.testing.assert_allclose(got, expected(case, variant), rtol=0, atol=tolerance)


@everywhere
@SETTINGS
@given(shapes())
@example(TREE)
@example(WIDE_HEADS)
def test_gpu_attention_is_near_float64(name, interpret, shape):
    check(shape, name, interpret, parts=2)


@everywhere
@pytest.mark.parametrize("parts", [1, 3, 7, MANY, None])
def test_parts_of_a_prefix_make_one_softmax(name, interpret, parts):
    check(EDGES, name, interpret, parts=parts)


FAR = dataclasses.replace(TREE, visible=(tuple(range(500, 524)),), page_size=64)
STRADDLING = AttentionVariant(window=125)
"""With FAR, windows begin in two blocks, behind five that no query sees."""
SINKS = jnp.asarray([1.0, -2.0, 0.0, 3.0])
VARIANTS = {
    "window": AttentionVariant(window=70, sinks=SINKS, scale=0.2),
    "array": AttentionVariant(window=jnp.asarray(2), soft_cap=1.5),
}


@everywhere
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("parts", [1, 3])
def test_gpu_attention_has_windows_caps_scales_and_sinks(name, interpret, variant, parts):
    check(EDGES, name, interpret, VARIANTS[variant], parts=parts)


@everywhere
def test_a_window_of_all_tiles_skips_blocks(name, interpret):
    """Queries of two tiles, whose windows begin in different blocks; pages before them are gone."""
    case = make(FAR)
    right = expected(case, STRADDLING)
    gone = case.table[0, : (501 - STRADDLING.window) // 64].copy()
    case.k_pages[gone] = case.v_pages[gone] = np.nan
    case.table[0, : len(gone)] = -1
    got = attend(case, name, interpret, STRADDLING, parts=2)
    np.testing.assert_allclose(got, right, rtol=0, atol=cases.TOLERANCE["bfloat16"])


@everywhere
def test_one_page_a_row_needs_no_table(name, interpret):
    case = make(Shapes(visible=((200,), (3,)), page_size=384, seed=4, dtype="bfloat16"))
    for pages in case[1:3]:
        pages[:] = np.nan_to_num(pages)
    untabled = case._replace(table=np.array([[1], [2]], np.int32))
    got = attend(untabled, name, interpret, page_table=Contiguous(1))
    np.testing.assert_allclose(got, expected(untabled), rtol=0, atol=cases.TOLERANCE["bfloat16"])


@everywhere
def test_only_queries_that_see_a_wrong_page_are_nan(name, interpret):
    case = make(Shapes(visible=((5, 70), (64, 64)), page_size=64, dtype="bfloat16"))
    case.table[0, 1] = 99
    np.testing.assert_array_equal(
        np.isnan(attend(case, name, interpret)).all(axis=(2, 3)), [[False, True], [False, False]]
    )


@everywhere
def test_queries_are_more_than_the_tiles_of_a_block_of_the_grid(name, interpret):
    check(WIDE, name, interpret)


@everywhere
@pytest.mark.parametrize(("queries", "head_dim"), [(25, 128), (45, 64), (25, 256)])
def test_all_tiles_have_read_a_slot_before_it_is_filled_again(name, interpret, queries, head_dim):
    visible = (tuple(range(640, 640 + queries)),)
    shape = dataclasses.replace(WIDE, visible=visible, entries=31, branches=3, head_dim=head_dim)
    check(shape, name, interpret, parts=1)


@everywhere
@pytest.mark.parametrize("parts", [7, MANY, None])
def test_a_query_gives_the_same_bits_beside_others(name, interpret, parts):
    """At the edges of blocks, from which on those beside it see one more."""
    lengths = (1, 63, 64, 65, 126, 127, 128, 129, 191, 192, 193, 255, 256)
    shape = Shapes(visible=((320,) * 5,), page_size=64, dtype="bfloat16", seed=6)
    case = make(shape)
    for length in lengths:
        among = length + np.arange(5, dtype=np.int32)[None]
        several = attend(case._replace(visible=among), name, interpret, parts=parts)
        alone = case._replace(q=case.q[:, :1], visible=among[:, :1])
        np.testing.assert_array_equal(attend(alone, name, interpret, parts=parts), several[:, :1])


def test_each_of_eight_devices_attends_for_its_heads(monkeypatch):
    """With XLA in the kernel's place: JAX interprets a kernel on one device at a time."""

    def attend_here(q, pages, table, seen, branches, sinks, **_how):
        assert (q.shape[2], pages.shape[1], branches.shape[1], len(sinks)) == (2, 1, 1, 2)
        scratch, variant = Scratch(branches, seen.paths), AttentionVariant(sinks=sinks)
        return tree_attention_xla(q, pages, table, seen.visible, scratch, variant)

    monkeypatch.setattr(pallas_gpu, "_attend", attend_here)
    shape = Shapes(visible=((130, 7),), kv_heads=8, branches=2, entries=2, dtype="bfloat16")
    case = hide_unseen(make(shape))
    shards = HeadShards("model", mesh=Mesh(np.array(jax.devices()[:8]), ("model",)))
    variant = AttentionVariant(sinks=jnp.linspace(-1, 1, 16))
    got = attend(case, "pallas_gpu", None, variant, shards=shards)
    tolerance = cases.TOLERANCE["bfloat16"]
    np.testing.assert_allclose(got, expected(case, variant), rtol=0, atol=tolerance)


CAPPED = "cap_scores(", "(lambda scores, soft_cap: scores)("
MUTANTS = {
    pallas_gpu_part: {
        "a position too many": (
            "column < lax.broadcast_in_dim(visible_columns",
            "column <= lax.broadcast_in_dim(visible_columns",
        ),
        "blocks that are taken for seen": (
            "lax.div(operands.common_length[self.b], block)",
            "lax.div(self.length, block)",
        ),
        "parts that overlap": ("self.part + index * self.parts", "self.part + index"),
        "a part without its last block": ("self.part + (self.parts - 1)", "self.part"),
        "branches in every part": ("self.part == self.parts - 1", "self.part >= 0"),
        "the tokens of other branches": (
            "lax.rem(entry, self.M) == lax",
            "lax.rem(entry, self.M) != lax",
        ),
        "the tokens beside the path": ("return same_branch & (on_path == 1)", "return same_branch"),
        "the path of the entry before": ("path_bits, bit)", "path_bits, bit + 1)"),
        "a position before the window": (
            "visible &= column >= lax.broadcast_in_dim(hidden_columns",
            "visible &= column + 1 >= lax.broadcast_in_dim(hidden_columns",
        ),
        "blocks before the window that are taken for seen": (
            "lax.div(operands.window.common_start[self.b] + (block - 1), block)",
            "lax.div(operands.window.start[self.b], block)",
        ),
        "blocks in a window that are left out": (
            "start = lax.div(operands.window.start[self.b], block)",
            "start = lax.div(operands.window.common_start[self.b], block)",
        ),
        "blocks of the beginning in place of the window's": (
            "index = index + self.left_out",
            "index = index",
        ),
    },
    pallas_gpu_wgmma: {
        "a cap left out": CAPPED,
        "what nobody sees stays": ("row < visible_rows, v", "row < block, v"),
        "a total that keeps the scale of an earlier maximum": ("total * rescale + w", "total + w"),
        "an output that does": ("rescale_output(softmax.output, rescale)", "softmax.output"),
        "tiles of the first group": ('lax.axis_index("tile") * tiles', "0 * tiles"),
        "the slot of the next block": (
            "copy_gmem_to_smem(v, v_shared.at[slot]",
            "copy_gmem_to_smem(v, v_shared.at[lax.rem(slot + 1, slots)]",
        ),
        "keys of the first block": ("k_shared.at[slot].transpose", "k_shared.at[0].transpose"),
        "keys for values": ("pl.ds(head_dim, head_dim)", "pl.ds(0, head_dim)"),
        "queries of the first tile": ("* tiles + thread) * ROWS", "* tiles) * ROWS"),
    },
    pallas_gpu_mma: {
        "a cap left out": CAPPED,
        "what nobody sees stays": ("row < part.visible_positions(index), kv", "row < block, kv"),
        "a total that keeps the scale of an earlier maximum": ("total * rescale + w", "total + w"),
        "an output that does": ("rescale_output(softmax.output, rescale)", "softmax.output"),
        "queries of the first tile": ('lax.axis_index("tile") * ROWS', "0 * ROWS"),
        "the block that was read": ("jnp.minimum(index + 1, end - 1)", "jnp.minimum(index, end)"),
        "the second block first": ("fetch(part.page_block(0))", "fetch(part.page_block(1))"),
        "keys for values": ("head_dim + piece.start", "piece.start"),
        "queries of the first piece": ("q_shared.at[:, piece], l", "q_shared.at[:, pieces[0]], l"),
        "keys of the first piece": ("kv_shared.at[:, piece]", "kv_shared.at[:, pieces[0]]"),
        "values of the first piece": ("head_dim + piece.start", "head_dim"),
    },
}


@pytest.mark.aot
@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, id=f"{module.__name__.rpartition('_')[2]}-{name}")
        for module, edits in MUTANTS.items()
        for name in edits
    ],
)
def test_every_mutant_is_caught(module, name, monkeypatch):
    old, new = MUTANTS[module][name]
    path = Path(module.__file__)
    text = path.read_text()
    assert text.count(old) == 1, "an edit must fit the source exactly once"
    mutant = dict(vars(module))
    exec(compile(text.replace(old, new), f"{path} mutant", "exec"), mutant)
    changed = "SequencePart" if module is pallas_gpu_part else "kernel"
    kernel = pallas_gpu_wgmma if module is pallas_gpu_wgmma else pallas_gpu_mma
    monkeypatch.setattr(kernel, changed, mutant[changed])
    monkeypatch.setattr(sys.modules[__name__], "compiled", compiled.__wrapped__)
    shape = WIDE if "group" in name else TREE if "tile" in name else EDGES
    variant = VARIANTS["array"] if "cap" in name or "window" in name else PLAIN
    if "window" in name and "blocks" in name:
        shape, variant = FAR, STRADDLING
    if "piece" in name:
        shape = WIDE_HEADS
    backend = next(name for name, candidate in pallas_gpu.KERNELS.items() if candidate is kernel)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(shape, backend, INTERPRETED, variant, parts=2)


def test_pages_and_devices_without_the_gpu_kernel_are_refused():
    def pages(size=128, width=128, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, 1, size, width), dtype)

    assert pallas_gpu.why_not(64, pages()) is None
    assert "head_dim = 80 in pages of width 160: it needs 64, 128 or 256" in pallas_gpu.why_not(
        80, pages(width=160)
    )
    assert pallas_gpu.why_not(64, pages(48)) == "page_size = 48: it needs a multiple of 64"
    assert pallas_gpu.why_not(64, pages(dtype=jnp.float32)) == "pages of float32: it needs bfloat16"
    with pytest.raises(ValueError, match="does not take page_size = 48"):
        attend(make(Shapes(visible=((5,),), page_size=48, dtype="bfloat16")), "pallas_mma", None)


def test_gpus_that_have_a_kernels_instructions():
    def why_not(capability, name):
        return pallas_gpu.why_not_on(types.SimpleNamespace(compute_capability=capability), name)

    assert why_not("9.0", "pallas_gpu") is why_not("9.0", "pallas_mma") is None
    assert why_not("8.0", "pallas_mma") is why_not("10.0", "pallas_mma") is None
    assert why_not("8.9", "pallas_gpu") == (
        "a device of compute capability 8.9: it needs 9.0 (H100, H200); pallas_mma runs there"
    )
    assert why_not("7.5", "pallas_mma") == (
        "a device of compute capability 7.5: it needs 8.0 to 10.3 (A100 to B200)"
    )
    assert "capability none: it needs 9.0" in pallas_gpu.why_not_on(jax.devices("cpu")[0])
