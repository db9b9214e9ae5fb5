"""Kernels of products with experts' weights compile for chips that are not there."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ssd_jax.kernels.experts.estimate import expected_experts
from ssd_jax.kernels.experts.groups import ExpertGroups, columns, device_form, scale_rows
from ssd_jax.kernels.experts.groups import rows as value_rows
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.quantized import Quantized
from ssd_jax.models.sharding import mesh_of
from ssd_jax.tools.aot import chips, hlo, traffic
from tests.tools.aot import gpus

pytestmark = pytest.mark.aot

SHAPES = {
    "Qwen3-30B-A3B": (128, 8, 768, 2048),
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "dots.llm1": (128, 6, 1408, 4096),  # whose 5 rows are 30, no whole tiles
}
"""Experts, those of a token, and outputs and inputs of a matrix."""
ROWS = (1, 5, 16, 512)
BY_ROWS = "int8 by rows"

FORMS = {
    "mxfp4": GroupForm(FLOAT4, 32),
    "int4": GroupForm("int4", 128),
    "int4, groups of 32 with minima": GroupForm("int4", 32, minima=True),
    "int8": GroupForm("int8", 128),
    "float8": GroupForm("float8_e4m3fn", 128),
}


def moved(chip: str, model: str, rows: int, kind: str) -> tuple[int, int, list[str]]:
    """Bytes that two products move, bytes of the weights that rows are expected to use, and copies
    as large as an expert's; of weights of a dtype, int8 with a scale a row, or in a form."""
    experts, chosen, outputs, inputs = SHAPES[model]
    mesh = mesh_of(chips.devices(chip))
    gpu = chips.chip_named(chip).platform == "gpu"

    def call(x, sizes, weights):
        if gpu:
            from ssd_jax.kernels.experts.pallas_gpu import expert_products_pallas_gpu as products
        else:
            from ssd_jax.kernels.experts.pallas_tpu import expert_products_pallas_tpu as products
        weights = [weight_of(arrays) for arrays in weights]
        return products(x, sizes, weights, used=expected_experts(experts, rows, chosen))

    def like(shape, dtype):
        sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    if kind in FORMS:
        form = device_form(FORMS[kind], inputs)
        assert form is not None
        values = experts, value_rows(form, inputs), columns(outputs)
        scales = experts, scale_rows(form, inputs), columns(outputs)
        arrays = (
            like(values, "int32" if form.bits == 4 else form.dtype),
            like(scales, "int32" if form.dtype == FLOAT4 else "float32"),
            like(scales, "float32") if form.minima else None,
        )

        def weight_of(arrays):
            return ExpertGroups(*arrays, form.group, outputs)
    elif kind == BY_ROWS:
        shape = experts, outputs, inputs
        arrays = like(shape, "int8"), like(shape[:2], "float32")

        def weight_of(arrays):
            return Quantized(*arrays)
    else:
        arrays = (like((experts, outputs, inputs), kind),)

        def weight_of(arrays):
            return arrays[0]

    arguments = like((rows * chosen, inputs), "float32"), like((experts,), "int32")
    with jax.default_device(mesh.devices.flat[0] if gpu else None):
        compiled = jax.jit(call).lower(*arguments, [arrays] * 2).compile()
    module = hlo.read(compiled.as_text())
    one = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(arrays)) // experts
    if gpu and kind in FORMS:  # of which it reads outputs by 64, and not those that fill tiles
        one = one * (-(-outputs // 64) * 64) // columns(outputs)
    least = round(2 * expected_experts(experts, rows, chosen) * one)
    return traffic.count(module, 1).moved, least, [copy.name for copy in module.copies(one)]


def check(found: tuple[int, int, list[str]], rows: int, many: float = 1.6) -> None:
    """Beside the weights of experts with rows, nothing large moves: where these are many, what
    they are multiplied to, up to `many` times the weights."""
    total, least, copies = found
    print(f"{rows} rows: {total / least:.2f} times the weights of their experts")
    assert copies == []
    assert least <= total < (1.15 if rows <= 16 else many) * least


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("chip", "model", "dtype"),
    [
        ("v5e", "Qwen3-30B-A3B", "bfloat16"),
        *(
            pytest.param(chip, model, dtype, marks=pytest.mark.slow)
            for chip in chips.TPUS
            for model in SHAPES
            for dtype in ("bfloat16", "float32")
            if (chip, model, dtype) != ("v5e", "Qwen3-30B-A3B", "bfloat16")
        ),
    ],
)
def test_tpus_read_the_experts_that_rows_use(chip, model, dtype, rows):
    check(moved(chip, model, rows, dtype), rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("chip", "model", "form"),
    [
        ("v5e", "gpt-oss-20b", "mxfp4"),
        *(
            pytest.param(chip, model, form, marks=pytest.mark.slow)
            for chip in chips.TPUS
            for model in SHAPES
            for form in FORMS
            if (chip, model, form) != ("v5e", "gpt-oss-20b", "mxfp4")
        ),
    ],
)
def test_so_they_do_in_few_bits(chip, model, form, rows):
    total, least, copies = moved(chip, model, rows, form)
    # 512 rows use all experts, whose scales may come first, and are larger than an expert.
    check((total, least, copies if rows <= 16 else []), rows)


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus.WHY), reason=str(gpus.WHY))
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["bfloat16", BY_ROWS, *FORMS])
@pytest.mark.parametrize("model", SHAPES)
def test_hopper_reads_the_experts_that_rows_use(model, kind, rows):
    """In a process of its own: JAX compiles kernels for one generation of GPUs in each."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(moved, "h100", model, rows, kind).result()
    check(found, rows, 1.6 if kind == "bfloat16" else 2.2)
