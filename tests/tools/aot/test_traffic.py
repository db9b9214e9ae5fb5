"""What a program moves and computes, on texts whose answers are known."""
# ruff: noqa: E501 (an instruction of HLO is a line)

import jax
import jax.numpy as jnp
import pytest

from ssd_jax.tools.aot import hlo, traffic
from ssd_jax.tools.aot.traffic import Collective

LAYERS, WIDE = 7, 256


def counted(text, devices=1):
    return traffic.count(hlo.read(text), devices)


def of(function, *arguments):
    return counted(jax.jit(function).lower(*arguments).compile().as_text())


def scanned(x, weights):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]


def test_a_scanned_layer_counts_as_often_as_it_runs():
    one = of(scanned, jnp.ones((8, WIDE)), jnp.ones((1, WIDE, WIDE)))
    all_of_them = of(scanned, jnp.ones((8, WIDE)), jnp.ones((LAYERS, WIDE, WIDE)))
    assert one.flops == 2 * 8 * WIDE * WIDE
    assert all_of_them.flops == LAYERS * one.flops
    weights = LAYERS * WIDE * WIDE * 4
    assert weights <= all_of_them.moved < 4 * weights  # on CPU each slice is copied before its use


LOOP = """%sliced (stack: bf16[7,256,256], i: s32[]) -> bf16[256,256] {
  %stack = bf16[7,256,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %cut = bf16[1,256,256]{2,1,0:T(8,128)(2,1)} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,256,256}
  ROOT %flat = bf16[256,256]{1,0:T(8,128)(2,1)} bitcast(%cut)
}

%multiplied (x: bf16[8,256], stack: bf16[7,256,256], i: s32[]) -> bf16[8,256] {
  %x = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %stack = bf16[7,256,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %weight = bf16[256,256]{1,0:T(8,128)(2,1)} fusion(%stack, %i), kind=kLoop, calls=%sliced
  ROOT %y = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} convolution(%x, %weight), dim_labels=bf_oi->bf
}

%body (a: (s32[], bf16[8,256], bf16[7,256,256])) -> (s32[], bf16[8,256], bf16[7,256,256]) {
  %a = (s32[]{:T(128)}, bf16[8,256]{1,0:T(8,128)(2,1)S(1)}, bf16[7,256,256]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)S(6)} get-tuple-element(%a), index=0
  %x = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%a), index=1
  %stack = bf16[7,256,256]{2,1,0:T(8,128)(2,1)} get-tuple-element(%a), index=2
  %y = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} fusion(%x, %stack, %i), kind=kOutput, calls=%multiplied
  %sum = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} all-reduce(%y), replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, bf16[8,256]{1,0}, bf16[7,256,256]{2,1,0}) tuple(%i, %sum, %stack)
}

ENTRY %main (x: bf16[8,256], stack: bf16[7,256,256]) -> bf16[8,256] {
  %x = bf16[8,256]{1,0:T(8,128)(2,1)} parameter(0)
  %stack = bf16[7,256,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  %near = bf16[8,256]{1,0:T(8,128)(2,1)S(1)} copy(%x)
  %zero = s32[]{:T(128)S(6)} constant(0)
  %a = (s32[]{:T(128)}, bf16[8,256]{1,0:S(1)}, bf16[7,256,256]{2,1,0}) tuple(%zero, %near, %stack)
  %w = (s32[]{:T(128)}, bf16[8,256]{1,0:S(1)}, bf16[7,256,256]{2,1,0}) while(%a), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  ROOT %y = bf16[8,256]{1,0:T(8,128)(2,1)} get-tuple-element(%w), index=1
}
"""


def test_of_a_stack_a_layer_reads_its_own_slice_and_nothing_that_is_on_the_chip():
    work = counted(LOOP, 8)
    assert work.moved == 8 * 256 * 2 + LAYERS * 256 * 256 * 2
    assert work.flops == LAYERS * 2 * 8 * 256 * 256
    assert work.collectives == (Collective(8 * 256 * 2, 4, LAYERS, kind="all-reduce"),)


def test_a_fault_in_the_count_of_trips_is_seen():
    assert counted(LOOP.replace('"7"', '"1"'), 8).moved < counted(LOOP, 8).moved / 6


def test_a_slice_of_what_a_fusion_only_turns_is_a_slice():
    turned = LOOP.replace("dynamic-slice(%stack, %i", "dynamic-slice(%turned, %i").replace(
        "  %cut = ",
        "  %turned = bf16[7,256,256]{2,1,0:T(16,128)(2,1)} fusion(%stack), kind=kLoop, calls=%turn\n  %cut = ",
    )
    turn = """%turn (y: bf16[7,256,256]) -> bf16[7,256,256] {
  %y = bf16[7,256,256]{2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %z = bf16[7,256,256]{2,1,0:T(16,128)(2,1)} copy(%y)
}

"""
    assert counted(turn + turned, 8) == counted(LOOP, 8)


UPDATE = """%put (pages: bf16[64,512], new: bf16[1,512], at: s32[]) -> bf16[64,512] {
  %pages = bf16[64,512]{1,0} parameter(0)
  %new = bf16[1,512]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %put = bf16[64,512]{1,0} dynamic-update-slice(%pages, %new, %at, %zero)
}

ENTRY %main (pages: bf16[64,512], new: bf16[1,512], at: s32[]) -> bf16[64,512] {
  %pages = bf16[64,512]{1,0} parameter(0)
  %new = bf16[1,512]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %out = bf16[64,512]{1,0} fusion(%pages, %new, %at), kind=kLoop, calls=%put
}
"""


def test_a_buffer_updated_in_place_counts_by_its_update():
    assert counted(UPDATE).moved == 2 * 512 * 2 + 4  # read, written, and the place
    copied = UPDATE.replace("dynamic-update-slice(%pages, %new, %at, %zero)", "negate(%pages)")
    assert counted(copied).moved > 64 * 512 * 2


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        # 8 heads of a projection, as windows of which one position meets a value
        (
            "f32[5,8,128] convolution(%x, %w), window={size=8 pad=7_7 rhs_reversal=1}, "
            "dim_labels=bf0_0oi->b0f | bf16[5,4096,1] | bf16[8,128,4096]",
            2 * 5 * 8 * 128 * 4096,
        ),
        # a product for each of 2 key/value heads
        (
            "f32[2,20,512] convolution(%x, %w), window={size=2 lhs_dilate=2}, "
            "dim_labels=0bf_0oi->0bf | bf16[2,20,128] | bf16[2,512,128]",
            2 * 2 * 20 * 512 * 128,
        ),
        (
            "f32[5,64] dot(%x, %w), lhs_contracting_dims={1} | f32[5,32] | f32[32,64]",
            2 * 5 * 64 * 32,
        ),
    ],
)
def test_products_are_counted_once(line, flops):
    line, left, right = line.split(" | ")
    text = f"ENTRY %m (x: f32[]) -> f32[] {{\n  %x = {left} parameter(0)\n"
    text += f"  %w = {right} parameter(1)\n  ROOT %y = {line}\n}}\n"
    assert counted(text).flops == flops


def test_a_copy_to_the_chip_reads_once():
    text = """ENTRY %m (x: f32[]) -> f32[] {
  %x = f32[64,128]{1,0} parameter(0)
  %s = (f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%x)
  ROOT %y = f32[64,128]{1,0:S(1)} copy-done(%s)
}
"""
    assert counted(text).moved == 64 * 128 * 4


def test_a_slice_that_is_sent_to_the_chip_reads_what_it_cuts_out():
    text = """ENTRY %m (x: f32[]) -> f32[] {
  %x = f32[64,128]{1,0} parameter(0)
  %s = ((f32[64,128]{1,0}), f32[16,128]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%x), slice={[0:16], [0:128]}
  ROOT %y = f32[16,128]{1,0:S(1)} slice-done(%s)
}
"""
    assert counted(text).moved == 16 * 128 * 4


@pytest.mark.parametrize(
    ("groups", "devices"),
    [("{{0,1,2,3},{4,5,6,7}}", 4), ("[2,4]<=[8]", 4), ("mesh['model'=8] {'model'}", 8)],
)
def test_the_devices_of_a_collective_are_read(groups, devices):
    text = f"""ENTRY %m (x: f32[]) -> f32[] {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %y = f32[16]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add
}}
"""
    assert counted(text, 8).collectives == (Collective(64, devices, 1, kind="all-reduce"),)


def test_a_sum_of_which_each_device_gets_a_part_goes_around_once():
    """What all get is such a sum, and then a gathering of its parts."""
    text = """ENTRY %m (x: f32[]) -> f32[] {
  %x = f32[16]{0} parameter(0)
  ROOT %y = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
}
"""
    assert counted(text, 4).collectives == (Collective(64, 4, 1, kind="reduce-scatter"),)


CALLED = """%sum (x: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  ROOT %y = f32[64,128]{1,0} all-reduce(%x), replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %m (x: f32[64,128]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  %s = ((), (), (s32[1]{0:S(2)})) call-start(), async_execution_thread="sparsecore", to_apply=%sum
  %u = ((f32[64,128]{1,0}), f32[64,128]{1,0}) call-update(%s, %x)
  ROOT %y = f32[64,128]{1,0} call-done(%u)
}
"""


def test_an_asynchronous_operation_counts_once():
    """As TPU7x has it: other cores of the chip copy and reduce."""
    size = 64 * 128 * 4
    work = counted(CALLED, 8)
    assert (work.moved, work.collectives) == (
        2 * size,
        (Collective(size, 8, 1, kind="all-reduce"),),
    )


def test_a_collective_of_several_arrays_is_of_all_of_them():
    text = """ENTRY %m (a: f32[1000], b: f32[500]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[500]{0} parameter(1)
  %s = (f32[1000]{0}, f32[500]{0}) all-reduce(%a, %b), replica_groups={{0,1}}, to_apply=%add
  ROOT %r = f32[1000]{0} get-tuple-element(%s), index=0
}
"""
    work = counted(text, 2)
    assert (work.moved, work.collectives) == (12000, (Collective(6000, 2, 1, kind="all-reduce"),))


def test_a_collective_that_starts_names_its_operands_and_does_not_write_them():
    text = """ENTRY %m (a: f32[1000]) -> f32[2000] {
  %a = f32[1000]{0} parameter(0)
  %s = (f32[1000]{0}, f32[2000]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}
  ROOT %r = f32[2000]{0} all-gather-done(%s)
}
"""
    work = counted(text, 2)
    assert (work.moved, work.collectives) == (12000, (Collective(8000, 2, 1, kind="all-gather"),))


@pytest.mark.parametrize("turned", ["multiply(%x, %w)", "add(%x, %w)"])
def test_a_product_with_one_row_is_a_sum_of_products(turned):
    """As compilers make one; what else is summed is none."""
    text = f"""%fused (x: f32[8,64], w: f32[8,64]) -> f32[8] {{
  %x = f32[8,64]{{1,0}} parameter(0)
  %w = f32[8,64]{{1,0}} parameter(1)
  %m = f32[8,64]{{1,0}} {turned}
  %b = f32[64,8]{{0,1}} bitcast(%m)
  ROOT %r = f32[8]{{0}} reduce(%b, %zero), dimensions={{0}}, to_apply=%add
}}

ENTRY %m (x: f32[8,64], w: f32[8,64]) -> f32[8] {{
  %x = f32[8,64]{{1,0}} parameter(0)
  %w = f32[8,64]{{1,0}} parameter(1)
  ROOT %f = f32[8]{{0}} fusion(%x, %w), kind=kInput, calls=%fused
}}
"""
    assert counted(text).flops == (2 * 8 * 64 if "multiply" in turned else 0)


def test_a_kernel_counts_as_the_scope_of_its_call_says():
    kernel = '%o = f32[8]{0} custom-call(%pages), custom_call_target="mosaic_gpu_v2"'
    about = ', metadata={op_name="jit(f)/bytes_accessed.640/pallas_gpu/mpmd_map"}'
    head = "ENTRY %m (pages: f32[64,128]) -> f32[8] {\n  %pages = f32[64,128]{1,0} parameter(0)\n"
    assert counted(f"{head}  ROOT {kernel}{about}\n}}\n").moved == 640
    assert counted(f"{head}  ROOT {kernel}\n}}\n").moved == 64 * 128 * 4 + 8 * 4


@pytest.mark.parametrize(("kind", "share"), [("s8", 1), ("bf16", 0)])
def test_the_products_of_a_kernel_are_of_what_it_takes(kind, share):
    estimate = 'backend_config={"custom_call_config":{"cost_estimate":{"flops":"640"}}}'
    text = f"""ENTRY %m (x: {kind}[64,128]) -> f32[8] {{
  %x = {kind}[64,128]{{1,0}} parameter(0)
  ROOT %o = f32[8]{{0}} custom-call(%x), custom_call_target="tpu_custom_call", {estimate}
}}
"""
    found = counted(text)
    assert (found.flops, found.of_int8) == (640, 640 * share)


@pytest.mark.parametrize(("kind", "share"), [("s32", 1), ("f32", 0)])
def test_a_product_by_a_library_counts_without_its_room_to_work_in(kind, share):
    text = """ENTRY %m (x: s8[512,2048], w: s8[4096,2048]) -> s32[512,4096] {
  %x = s8[512,2048]{1,0} parameter(0)
  %w = s8[4096,2048]{1,0} parameter(1)
  %c = (KIND[512,4096]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  ROOT %r = KIND[512,4096]{1,0} get-tuple-element(%c), index=0
}
"""
    found = counted(text.replace("KIND", kind))
    assert found.flops == 2 * 512 * 4096 * 2048
    assert found.of_int8 == share * found.flops
    assert found.moved == (512 + 4096) * 2048 + 4 * 512 * 4096
