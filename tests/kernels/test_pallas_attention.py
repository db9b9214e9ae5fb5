"""Attention by Pallas for TPUs, in the interpreter of JAX, where uninitialised memory is NaN."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.kv_pages import Contiguous, Scratch, lane_width
from ssd_jax.kernels.tree_attention import pallas_tpu
from ssd_jax.kernels.tree_attention.pallas_tpu import tree_attention_pallas_tpu
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant
from tests.kernels.attention_cases import (
    TOLERANCE,
    Case,
    Shapes,
    expected,
    hide_unseen,
    make,
    pack_kv,
)
from tests.kernels.attention_cases import shapes as any_shapes

EVERYTHING = Shapes(  # several blocks, pages and steps; an empty row, and rows that end at edges
    visible=((0, 0, 0), (300, 256, 1), (128, 127, 129), (0, 0, 0), (16, 17, 0)),
    kv_heads=2,
    page_size=32,
    branches=4,
    entries=3,
    seed=1,
)
MORE_BRANCHES_THAN_POSITIONS = Shapes(
    visible=((3, 4, 5),), page_size=16, branches=24, entries=1, seed=1
)
FEW = settings(max_examples=3, deadline=None, derandomize=True, database=None)
MANY = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def small_tiles(slots=1, queries=1 << 13, part=8):
    """Blocks of 128 positions; tiles of few queries and heads, as many of them have."""
    return mock.patch.multiple(
        pallas_tpu, _SLOT_BYTES=slots, _QUERY_BYTES=queries, _PRODUCT_ROWS=part
    )


def pages_of(case):
    return pack_kv(case.k_pages, case.v_pages)


def scratch_of(case):
    if case.paths is None:
        return None
    return Scratch(pack_kv(case.branch_k, case.branch_v), jnp.asarray(case.paths))


def attend(case, variant=PLAIN, *, interpret=None, page_table=None, jit=jax.jit, **options):
    interpret = pltpu.InterpretParams() if interpret is None else interpret
    table = jnp.asarray(case.table) if page_table is None else page_table

    def call(*arguments):
        return tree_attention_pallas_tpu(*arguments, interpret=interpret, **options)

    visible = jnp.asarray(case.visible)
    return np.asarray(
        jit(call)(jnp.asarray(case.q), pages_of(case), table, visible, scratch_of(case), variant)
    )


def assert_right(case, got, variant=PLAIN):
    tolerance = TOLERANCE[case.q.dtype.name]
    np.testing.assert_allclose(got, expected(case, variant), rtol=0, atol=tolerance)


def check(shapes):
    case = hide_unseen(make(shapes))
    assert_right(case, attend(case))


@pytest.mark.more
@FEW
@given(any_shapes())
@example(EVERYTHING)
@example(MORE_BRANCHES_THAN_POSITIONS)
def test_pallas_attention_is_near_float64(shapes):
    check(shapes)


@pytest.mark.slow
@MANY
@given(any_shapes(), st.booleans())
def test_pallas_attention_is_near_float64_in_many_shapes(shapes, small):
    with small_tiles() if small else mock.MagicMock():
        check(shapes)


@pytest.mark.more
@pytest.mark.parametrize("cores", [1, 2])
def test_steps_of_several_tiles_and_heads_do_not_race(cores):
    case = hide_unseen(make(EVERYTHING))
    interpret = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=cores)
    with small_tiles(queries=1 << 14):
        tiles = pallas_tpu._tiles(case.q, pages_of(case), case.table)
        got = attend(case, interpret=interpret)
    assert (tiles.heads, tiles.block) == (1, 128)
    assert_right(case, got)
    assert not interpreter.races.races_found


def test_tiles_of_queries_read_what_they_see():
    case = hide_unseen(make(Shapes(visible=(tuple(range(1, 41)), (0,) * 40), seed=2)))
    with small_tiles(queries=40 << 10):
        tiles = pallas_tpu._tiles(case.q, pages_of(case), case.table)
        got = attend(case)
    assert tiles.per_sequence > 1
    assert tiles.product_rows < tiles.rows
    assert_right(case, got)


@pytest.mark.more
@pytest.mark.parametrize("window", [2, 140, jnp.asarray(140)], ids=["2", "140", "array"])
def test_pallas_attention_has_windows_caps_scales_and_sinks(window):
    sinks = jnp.asarray([1.0, -2.0, 0.0, 3.0])
    variant = AttentionVariant(window=window, soft_cap=1.5, scale=0.2, sinks=sinks)
    case = hide_unseen(make(EVERYTHING), int(window))
    assert_right(case, attend(case, variant), variant)


def test_pages_behind_the_window_may_be_gone():
    case = make(Shapes(visible=((300, 290),), page_size=16, seed=3))
    window = AttentionVariant(window=20)
    right = expected(case, window)
    gone = (290 - 20) // 16
    freed = case.table[0, :gone].copy()
    case.k_pages[freed] = case.v_pages[freed] = np.nan
    case.table[0, :gone] = -1
    np.testing.assert_allclose(attend(case, window), right, rtol=0, atol=2e-6)


def test_one_page_a_row_needs_no_table():
    case = make(Shapes(visible=((200,), (3,)), page_size=384, seed=4))
    case.k_pages[:], case.v_pages[:] = (np.nan_to_num(pages) for pages in case[1:3])
    untabled = case._replace(table=np.array([[1], [2]], np.int32))
    got = attend(untabled, page_table=Contiguous(1))
    assert_right(untabled, got)


@pytest.mark.more
def test_a_row_does_not_depend_on_how_long_its_neighbour_is():
    def first_row(neighbour):
        case = make(Shapes(visible=((40, 41), (400, 400)), page_size=16, seed=5))
        visible = np.array([[40, 41], [neighbour, neighbour]], np.int32)
        return attend(case._replace(visible=visible))[0]

    np.testing.assert_array_equal(first_row(1), first_row(400))


@pytest.mark.more
@pytest.mark.shipped
def test_pallas_attention_shares_heads_on_eight_devices():
    case = hide_unseen(make(Shapes(visible=((130, 7),), kv_heads=8, branches=2, entries=2)))
    shards = HeadShards("model", mesh=Mesh(np.array(jax.devices()[:8]), ("model",)))
    variant = AttentionVariant(window=20, sinks=jnp.linspace(-1, 1, 16))
    got = attend(case, variant, interpret=True, shards=shards)
    assert_right(case, got, variant)
    unsplit = attend(case, variant, interpret=True, shards=shards._replace(split=False))
    np.testing.assert_array_equal(got, unsplit)


class _Counter:
    """Bytes of pages that copies move, counted when they start."""

    def __init__(self):
        self.bytes = 0
        self._make = pltpu.make_async_copy

    def make_async_copy(self, source, target, semaphore):
        copy = self._make(source, target, semaphore)
        size = source.dtype.itemsize * int(np.prod(source.shape))

        def start():
            jax.debug.callback(self._add, size)
            copy.start()

        return mock.Mock(start=start, wait=copy.wait)

    def _add(self, size):
        self.bytes += int(size)


@pytest.mark.parametrize("page_size", [16, 128])
def test_each_position_is_copied_once_for_all_queries_of_a_sequence(page_size):
    lengths = (130, 301, 0, 700, 512)
    shapes = Shapes(
        visible=tuple((length, length // 2) for length in lengths),
        kv_heads=2,
        group=4,
        page_size=page_size,
        dtype="bfloat16",
    )
    case, counter = make(shapes), _Counter()
    with mock.patch.object(pltpu, "make_async_copy", counter.make_async_copy):
        assert_right(case, attend(case))
    jax.effects_barrier()
    least = sum(lengths) * 2 * lane_width(64) * 2
    assert least <= counter.bytes <= 1.02 * least


def wrong(case, name, value):
    arguments = case._asdict() | {name: value}
    return Case(**arguments)


SMALL = Shapes(visible=((5, 3),), branches=2, entries=2)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("table", lambda a: np.full_like(a, 3), "pages 0 to 2"),
        pytest.param(
            *("table", lambda a: np.full_like(a, -1), "pages 0 to 2"), marks=pytest.mark.more
        ),
        ("visible", lambda a: np.full_like(a, 129), "up to 128"),
        ("paths", lambda a: np.full_like(a, 4), "branches 0 to 1 and entries 0 to 1"),
    ],
)
def test_what_is_out_of_range_is_an_error_or_nan(name, change, message):
    case = make(SMALL)
    bad = wrong(case, name, change(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        attend(bad, jit=lambda call: call)
    assert np.isnan(attend(bad)).all()


def test_only_queries_that_see_a_wrong_page_are_nan():
    case = make(Shapes(visible=((5, 20), (16, 16)), page_size=16))
    case.table[0, 1] = 99
    np.testing.assert_array_equal(
        np.isnan(attend(case)).all(axis=(2, 3)), [[False, True], [False, False]]
    )


@pytest.mark.parametrize(
    ("shapes", "change", "message"),
    [
        (Shapes(visible=((1,),), page_size=24), {}, "page_size = 24: it needs a multiple of 16"),
        (SMALL, {"table": np.zeros((1, 1 << 18), np.int32)}, "the limit is 524288"),
    ],
)
def test_what_the_kernel_does_not_have_is_an_error_with_limits(shapes, change, message):
    case = make(shapes)._replace(**change)
    with pytest.raises(ValueError, match=message):
        pallas_tpu._check(case.q, pages_of(case), case.table)


def test_pages_that_pallas_attention_cannot_read_are_refused():
    bits = jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.uint16)
    assert pallas_tpu.why_not(64, bits) == "pages of uint16: it needs bfloat16 or float32"
    narrow = jax.ShapeDtypeStruct((1, 1, 128, 160), jnp.bfloat16)
    assert pallas_tpu.why_not(80, narrow) == "160 lanes for head_dim = 80: it needs 256"
    assert [lane_width(size) for size in (16, 64, 80, 128, 256)] == [128, 128, 256, 256, 512]
    assert kv_pages.storage_dtype(jnp.dtype(jnp.bfloat16), "tpu") in pallas_tpu.DTYPES
