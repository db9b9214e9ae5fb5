"""Products with experts' weights by Pallas for GPUs, in the interpreter of JAX."""

import dataclasses
import importlib
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ssd_jax import compat
from ssd_jax.devices.opening.models import execution_for
from ssd_jax.kernels.experts import reference
from ssd_jax.kernels.experts.groups import device_form
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.quantized import DIGIT, W8A8, Quantized, digits
from tests.kernels import expert_cases as cases
from tests.kernels.expert_groups import FORMS, made

OLD = compat.why_no_mosaic_gpu()
if OLD is not None:
    pytest.skip(f"products by Mosaic GPU: {OLD}", allow_module_level=True)

from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from ssd_jax.kernels import experts  # noqa: E402
from ssd_jax.kernels.experts import gpu_operands, groups, pallas_gpu  # noqa: E402
from ssd_jax.kernels.experts.api import (  # noqa: E402
    XLA,
    ExpertBackend,
    expert_products,
    why_looped,
)

pytestmark = pytest.mark.aot
interpreted = plgpu.InterpretGPUParams()
KERNEL = ExpertBackend("pallas_gpu")
HOPPER, AMPERE = (
    SimpleNamespace(device_kind="", compute_capability=number) for number in ("9.0", "8.0")
)


def by_kernel(x, sizes, *weights, module=pallas_gpu):
    def call(x, sizes, weights):
        return module.expert_products_pallas_gpu(x, sizes, weights, used=1.0, interpret=interpreted)

    return [np.asarray(y) for y in jax.jit(call)(x, np.asarray(sizes, np.int32), list(weights))]


def products(case, module=pallas_gpu):
    return by_kernel(case.x, case.sizes, case.weight, module=module)


def states(rows, inputs):
    """Values that bfloat16 has."""
    x = np.random.default_rng(1).normal(size=(rows, inputs))
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def integers(kind, sizes, outputs, inputs):
    """An int8 weight of every expert; scales of experts without rows are NaN."""
    rng = np.random.default_rng(2)
    values = rng.integers(-127, 128, (len(sizes), outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.5, 1.5, (len(sizes), outputs)).astype(np.float32) / 127
    scales[np.asarray(sizes) == 0] = np.nan
    return kind(jnp.asarray(values), jnp.asarray(scales))


def of_digits(x, sizes, weight):
    """Products of rows in digits."""
    parts = digits(jnp.asarray(x), single=isinstance(weight, W8A8))
    high, low, scales = (None if part is None else np.asarray(part, float) for part in parts)
    rows = (high if low is None else high + low / DIGIT) * scales[:, None]
    dense = np.asarray(weight.values) * np.asarray(weight.scales, float)[..., None]
    arrays = rows.astype(np.float32), np.asarray(sizes, np.int32), dense.astype(np.float32)
    return reference.product(*arrays)


@pytest.fixture
def whole_tiles(monkeypatch):
    """Copies of rows and columns that begin at a tile of memory, as on a GPU, wherever they are
    told to begin: what would begin within a tile has other numbers."""
    slices, usual = type(pl.ds(0, 8)), plgpu.copy_gmem_to_smem

    def copy(source, target, arrived):
        [indexer] = source.transforms
        *before, rows, columns = indexer.indices

        def whole(index, size):
            return pl.ds(index.start // size * size, index.size)

        assert isinstance(rows, slices)
        assert isinstance(columns, slices)
        tile = 128 // source.dtype.itemsize
        part = whole(rows, 8), whole(columns, min(tile, columns.size))
        usual(source.ref.at[*before, *part], target, arrived)

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", copy)


@pytest.mark.parametrize("kind", ["bfloat16", "mxfp4", "int8", "integers"])
def test_copies_begin_at_tiles(kind, whole_tiles):
    """JAX's interpreter takes any rows; a GPU takes those of a tile that begin within it alone."""
    sizes, rows = cases.SIZES["few"]
    x = states(rows, 192)
    if kind == "bfloat16":
        case = cases.make("few", "bfloat16", inputs=192, outputs=200)
        x, weight, want = case.x, case.weight, cases.expected(case)
    elif kind == "integers":
        weight = integers(Quantized, sizes, 200, 192)
        want = of_digits(x, sizes, weight)
    else:
        weight, dense = made(FORMS[kind], len(sizes), 200, 192)
        want = reference.product(x, np.asarray(sizes, np.int32), dense)
    [got] = by_kernel(x, sizes, weight)
    np.testing.assert_allclose(got, want, atol=1e-4 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("name", cases.SIZES)
def test_products_are_near_float64(name):
    case = cases.make(name, "bfloat16")
    [got] = products(case)
    np.testing.assert_allclose(got, cases.expected(case), rtol=0, atol=cases.TOLERANCE["bfloat16"])


def test_more_chunks_of_inputs_than_slots_make_one_sum(monkeypatch):
    case = cases.make("few", "bfloat16", inputs=32 * 7, outputs=200)
    monkeypatch.setattr(gpu_operands._Floats, "ring_bytes", 2 * 2 * 32 * (64 + 8))
    [got] = products(case)
    np.testing.assert_allclose(got, cases.expected(case), rtol=0, atol=cases.TOLERANCE["bfloat16"])


def test_a_row_has_the_bits_that_it_has_alone():
    case = cases.make("few", "bfloat16")
    [among] = products(case)
    for row in (0, 2, 3, 7):
        expert = cases.expert_of(case.sizes)[row]
        sizes = np.eye(len(case.sizes), dtype=np.int32)[expert]
        alone = case._replace(x=case.x[row : row + 1], sizes=sizes)
        np.testing.assert_array_equal(products(alone)[0][0], among[row])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*((name, "few") for name in FORMS), *(("mxfp4", sizes) for sizes in [*cases.SIZES][1:])],
)
def test_products_with_groups_are_the_references(name, sizes):
    sizes, rows = cases.SIZES[sizes]
    for inputs, outputs in ((192, 160), (96, 40)):  # of a chunk of three blocks, and of two
        x, (weight, dense) = states(rows, inputs), made(FORMS[name], len(sizes), outputs, inputs)
        [got] = by_kernel(x, sizes, weight)
        want = reference.product(x, np.asarray(sizes, np.int32), dense)
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))
        assert not got[sum(sizes) :].any()


@pytest.mark.parametrize("name", ["mxfp4", "int4, 128, minima", "float8"])
def test_more_chunks_of_groups_than_slots_make_one_sum(name, monkeypatch):
    monkeypatch.setattr(gpu_operands._Groups, "ring_bytes", 0)  # two slots for five chunks
    monkeypatch.setattr(gpu_operands, "_COPIED_ROWS", 8)  # of scales, at a time
    sizes, rows = cases.SIZES["one"]
    x, (weight, dense) = states(rows, 640), made(FORMS[name], len(sizes), 64, 640)
    [got] = by_kernel(x, sizes, weight)
    want = reference.product(x, np.asarray(sizes, np.int32), dense)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_groups_of_eight_inputs_have_their_own_scales():
    """As the down projection of gpt-oss on eight devices, which have 360 of 2,880 inputs each."""
    sizes, rows = cases.SIZES["few"]
    form = device_form(GroupForm(FLOAT4, 32), 360)
    assert form.group == 8
    x, (weight, dense) = states(rows, 360), made(form, len(sizes), 64, 360)
    [got] = by_kernel(x, sizes, weight)
    want = reference.product(x, np.asarray(sizes, np.int32), dense)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_experts_without_rows_are_not_read_in_groups_either():
    sizes, rows = cases.SIZES["few"]
    x, (weight, dense) = states(rows, 64), made(FORMS["int4"], len(sizes), 64, 64)
    unread = np.asarray(sizes)[:, None, None] == 0
    poisoned = dataclasses.replace(weight, scales=jnp.where(unread, jnp.nan, weight.scales))
    [got] = by_kernel(x, sizes, poisoned)
    want = reference.product(x, np.asarray(sizes, np.int32), dense)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["mxfp4", "int8"])
def test_a_row_has_the_bits_that_it_has_alone_in_groups_too(name):
    sizes, rows = cases.SIZES["few"]
    x, (weight, _) = states(rows, 128), made(FORMS[name], len(sizes), 64, 128)
    [among] = by_kernel(x, sizes, weight)
    for row in (0, 2, 3, 7):
        expert = cases.expert_of(np.asarray(sizes))[row]
        alone = np.eye(len(sizes), dtype=np.int32)[expert]
        [got] = by_kernel(x[row : row + 1], alone, weight)
        np.testing.assert_array_equal(got[0], among[row])


@pytest.mark.parametrize("kind", [Quantized, W8A8])
@pytest.mark.parametrize("sizes", cases.SIZES)
def test_products_with_int8_are_those_of_their_digits(sizes, kind):
    sizes, rows = cases.SIZES[sizes]
    for inputs, outputs in ((512, 96), (96, 64)):  # in chunks of 256, and of 32
        x, weight = states(rows, inputs), integers(kind, sizes, outputs, inputs)
        [got] = by_kernel(x, sizes, weight)
        np.testing.assert_allclose(got, of_digits(x, sizes, weight), rtol=1e-5, atol=1e-5)
        assert not got[sum(sizes) :].any()


def test_more_chunks_of_int8_than_slots_make_one_sum(monkeypatch):
    monkeypatch.setattr(gpu_operands._Integers, "ring_bytes", 0)  # two slots for seven chunks
    sizes, rows = cases.SIZES["few"]
    x, weight = states(rows, 32 * 7), integers(Quantized, sizes, 200, 32 * 7)
    [got] = by_kernel(x, sizes, weight)
    np.testing.assert_allclose(got, of_digits(x, sizes, weight), rtol=1e-5, atol=1e-5)


def test_sums_of_int8_are_exact():
    """The largest numbers of both, whose sums float32 does not have."""
    inputs = 4096
    weight = Quantized(jnp.full((1, 64, inputs), 127, jnp.int8), jnp.ones((1, 64)))
    weight = weight._replace(values=weight.values.at[:, :, 0].set(126))
    x = np.full((1, inputs), 127, np.float32)
    [got] = by_kernel(x, (1,), weight)
    exact = 127 * 127 * inputs - 127
    assert exact > 1 << 24
    assert (got == np.float32(exact)).all()


@pytest.mark.parametrize("kind", [Quantized, W8A8])
def test_a_row_has_the_bits_that_it_has_alone_in_int8_too(kind):
    sizes, rows = cases.SIZES["few"]
    x, weight = states(rows, 128), integers(kind, sizes, 64, 128)
    [among] = by_kernel(x, sizes, weight)
    for row in (0, 2, 3, 7):
        expert = cases.expert_of(np.asarray(sizes))[row]
        alone = np.eye(len(sizes), dtype=np.int32)[expert]
        [got] = by_kernel(x[row : row + 1], alone, weight)
        np.testing.assert_array_equal(got[0], among[row])


def test_weights_that_the_kernel_does_not_take_are_refused():
    assert pallas_gpu.why_not(768, 2048, "bfloat16") is None
    assert pallas_gpu.why_not(768, 2048, "int8") is None
    assert pallas_gpu.why_not(96, 2880, "bfloat16") is None
    reason = "weights of float32: it needs bfloat16, int8, or groups"
    assert pallas_gpu.why_not(768, 2048, "float32") == reason
    assert "48 outputs: it needs 64" in pallas_gpu.why_not(48, 2048, "bfloat16")
    assert "360 inputs: it needs a multiple of 32" in pallas_gpu.why_not(2880, 360, "bfloat16")


def test_groups_whose_scales_leave_no_room_are_refused():
    assert pallas_gpu.why_not(2880, 2880, GroupForm(FLOAT4, 32)) is None
    assert pallas_gpu.why_not(2880, 2880, GroupForm("int8", 16)) is None
    small = GroupForm("int8", 8)
    reason = "64 outputs have scales of 92160 bytes: it has room for 65536"
    assert pallas_gpu.why_not(2880, 2880, small) == reason
    weight, _ = made(small, 1, 8, 2880)
    assert not pallas_gpu.takes(weight)
    [got] = expert_products(states(1, 2880), jnp.ones(1, jnp.int32), [weight], backend=KERNEL)
    assert got.shape == (1, 8)  # by XLA


MUTANTS = {
    "rows of the first item": (pallas_gpu, "item * width", "0 * item"),
    "rows of the first expert": (pallas_gpu, "starts[expert] + (", "0 * starts[expert] + ("),
    "rows of an expert's first item": (
        pallas_gpu,
        "(number - first[expert]) * block",
        "0 * number",
    ),
    "weights of the first expert": (
        gpu_operands,
        "weight.at[block.expert, ",
        "weight.at[0, ",
    ),
    "a last part that begins too early": (
        pallas_gpu,
        "operand.room - OUTPUTS)",
        "operand.room - OUTPUTS - 8)",
    ),
    "a chunk twice": (
        gpu_operands,
        "pl.ds(index * self.chunk, self.chunk)",
        "pl.ds(0 * index, self.chunk)",
    ),
    "a slot that is filled again too early": (
        pallas_gpu,
        "copy(index + slots))",
        "copy(index + slots - 1))",
    ),
    "an item of too few rows": (
        pallas_gpu,
        "blocks = pl.cdiv(group_sizes, block)",
        "blocks = group_sizes // block",
    ),
    "sums of the row before": (pallas_gpu, "offset % block\n", "(offset - 1) % block\n"),
    "rows that no expert has": (pallas_gpu, "of_row < experts", "of_row <= experts"),
}
MUTANTS_OF_GROUPS = {
    "numbers of the first expert": (
        gpu_operands,
        "block.arrays[0].at[block.expert, rows",
        "block.arrays[0].at[0, rows",
    ),
    "scales of the first expert": (
        gpu_operands,
        "array.at[block.expert, rows",
        "array.at[0, rows",
    ),
    "numbers of the first chunk": (gpu_operands, "index * self.chunk_rows", "0 * index"),
    "scales of the first chunk": (
        gpu_operands,
        "index * self.blocks + place)",
        "0 * index + place)",
    ),
    "numbers of the first block": (gpu_operands, "place * self.block_rows", "0"),
    "rows of the first block": (gpu_operands, "place * BLOCK, BLOCK", "0, BLOCK"),
    "the scale of the next group": (gpu_operands, "place * count // 8", "-place * count // 8"),
    "a scale of another word": (gpu_operands, "lax.rem(group, rows)", "lax.rem(group + 1, rows)"),
    "the first exponent of a word": (gpu_operands, "lax.div(group, rows)))", "0 * group))"),
    "zeros left out": (groups, "bits == _ZERO", "bits == 0"),
}
MUTANTS_OF_INT8 = {
    "no second digit": (gpu_operands, "high + low / DIGIT", "high"),
    "a second digit as large as the first": (gpu_operands, "low / DIGIT", "low"),
    "the first digit twice": (
        gpu_operands,
        "(0, block), (OUTPUTS, 2 * block)",
        "(0, 0), (OUTPUTS, block)",
    ),
    "one digit of two": (gpu_operands, "[high] if low is None else [high, low]", "[high, high]"),
    "scales of the first expert": (pallas_gpu, "weight.scales[of_row]", "weight.scales[:1]"),
    "no scales of rows": (pallas_gpu, "of_x.scales[:, None] * ", ""),
    "rows of half of the item": (pallas_gpu, "item * width", "item * (width // 2)"),
}


def kernel_with(module: ModuleType, old: str, new: str) -> ModuleType:
    """The kernel's module, with an edit in it or in what it imports."""
    names = [part.__name__ for part in (groups, gpu_operands, pallas_gpu)]
    usual = {name: sys.modules[name] for name in names}
    try:
        for name in names:
            fresh = ModuleType(name)
            fresh.__file__ = usual[name].__file__
            source = importlib.util.find_spec(name).loader.get_source(name)
            if name == module.__name__:
                assert source.count(old) == 1, "an edit must fit the source exactly once"
                source = source.replace(old, new)
            sys.modules[name] = fresh
            setattr(experts, name.rpartition(".")[2], fresh)
            exec(compile(source, f"{name} mutant", "exec"), vars(fresh))
        return fresh
    finally:
        sys.modules.update(usual)
        for name in names:
            setattr(experts, name.rpartition(".")[2], usual[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    mutant = kernel_with(*MUTANTS[name])
    mutant._LEAST_SLOTS = 1
    mutant.gpu_operands._Dense.ring_bytes = 0
    rows = "tiles" if name == "rows of an expert's first item" else "rows that no expert has"
    case = cases.make(rows, "bfloat16", inputs=32 * 7)
    [got] = products(case, mutant)
    right = cases.expected(case)
    assert not np.allclose(got, right, rtol=0, atol=cases.TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", MUTANTS_OF_INT8)
def test_every_mutant_with_int8_is_caught(name):
    mutant = kernel_with(*MUTANTS_OF_INT8[name])
    sizes, rows = cases.SIZES["few"]
    x, weight = states(rows, 96), integers(Quantized, sizes, 64, 96)
    [got] = by_kernel(x, sizes, weight, module=mutant)
    assert not np.allclose(got, of_digits(x, sizes, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MUTANTS_OF_GROUPS)
def test_every_mutant_with_groups_is_caught(name):
    mutant = kernel_with(*MUTANTS_OF_GROUPS[name])
    sizes, rows = cases.SIZES["few"]
    inputs = 64 * 6  # two chunks of three blocks; 12 groups, of which 8 are in a byte of words
    x, (weight, dense) = states(rows, inputs), made(FORMS["mxfp4"], len(sizes), 64, inputs)
    weight = mutant.ExpertGroups(**vars(weight))
    [got] = by_kernel(x, sizes, weight, module=mutant)
    want = reference.product(x, np.asarray(sizes, np.int32), dense)
    assert not np.allclose(got, want, atol=1e-3 * np.abs(want).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "w8a8", "native", "float32"])
def test_hopper_has_the_kernel_in_every_dtype(dtype):
    """Weights of float32 are then left to XLA one by one."""
    found = execution_for("gpu", dtype, 128, device=HOPPER).experts
    assert found == KERNEL
    assert execution_for("gpu", dtype, 128, device=AMPERE).experts == XLA
    assert execution_for("gpu", dtype, 128, device=HOPPER, attention="xla").experts == XLA


def test_matrices_that_the_kernel_does_not_take_are_named():
    def reason(outputs, inputs, kind, backend=KERNEL, device=HOPPER):
        matrices = [(outputs, inputs, kind), (inputs, outputs, kind)]
        return why_looped(backend, "gpu", device, matrices)

    assert reason(768, 2048, "bfloat16") is reason(768, 2048, "int8") is None
    assert reason(768, 2048, "float32").startswith("weights of float32: it needs")
    assert reason(360, 2880, "bfloat16") == "360 inputs: it needs a multiple of 32"
    assert reason(360, 2880, GroupForm(FLOAT4, 8)) is None
    lacking = "the kernel is for compute capability 9.0 (Hopper)"
    assert reason(768, 2048, "int8", XLA, AMPERE) == lacking
    assert reason(768, 2048, "int8", XLA) == "attention = 'xla' leaves out all kernels"
