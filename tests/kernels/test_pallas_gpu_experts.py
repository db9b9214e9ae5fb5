"""Products with experts' weights by Pallas for GPUs, in the interpreter of JAX."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ssd_jax import compat
from tests.kernels import expert_cases as cases

OLD = compat.why_no_mosaic_gpu()
if OLD is not None:
    pytest.skip(f"products by Mosaic GPU: {OLD}", allow_module_level=True)

from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402

from ssd_jax.kernels.experts import pallas_gpu  # noqa: E402
from ssd_jax.kernels.experts.api import ExpertBackend, why_looped  # noqa: E402

pytestmark = pytest.mark.aot
interpreted = plgpu.InterpretGPUParams()


def products(case, module=pallas_gpu):
    def call(x, sizes, weights):
        return module.expert_products_pallas_gpu(x, sizes, weights, used=1.0, interpret=interpreted)

    return [np.asarray(y) for y in jax.jit(call)(case.x, case.sizes, [case.weight])]


@pytest.mark.parametrize("name", cases.SIZES)
def test_products_are_near_float64(name):
    case = cases.make(name, "bfloat16")
    [got] = products(case)
    np.testing.assert_allclose(got, cases.expected(case), rtol=0, atol=cases.TOLERANCE["bfloat16"])


def test_more_chunks_of_inputs_than_slots_make_one_sum(monkeypatch):
    case = cases.make("few", "bfloat16", inputs=32 * 7, outputs=200)
    monkeypatch.setattr(pallas_gpu, "_RING_BYTES", 2 * 2 * 32 * (64 + 8))
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


def test_weights_that_the_kernel_does_not_take_are_refused():
    assert pallas_gpu.why_not(768, 2048, "bfloat16") is None
    assert pallas_gpu.why_not(96, 2880, "bfloat16") is None
    assert pallas_gpu.why_not(768, 2048, "int8") == "weights of int8: it needs bfloat16"
    assert "48 outputs: it needs 64" in pallas_gpu.why_not(48, 2048, "bfloat16")
    assert "360 inputs: it needs a multiple of 32" in pallas_gpu.why_not(2880, 360, "bfloat16")


MUTANTS = {
    "rows of the first item": ("pl.ds(begin, block)", "pl.ds(0, block)"),
    "weights of the first expert": ("weight.at[expert, part", "weight.at[0, part"),
    "a last part that begins too early": ("outputs - OUTPUTS)", "outputs - OUTPUTS - 8)"),
    "a chunk twice": ("pl.ds(index * chunk, chunk)", "pl.ds(0 * index, chunk)"),
    "a slot that is filled again too early": ("copy(index + slots))", "copy(index + slots - 1))"),
    "an item of too few rows": (
        "blocks = pl.cdiv(group_sizes, block)",
        "blocks = group_sizes // block",
    ),
    "sums of the row before": ("offset % block\n", "(offset - 1) % block\n"),
    "rows that no expert has": ("of_row < experts", "of_row <= experts"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, monkeypatch):
    old, new = MUTANTS[name]
    path = Path(pallas_gpu.__file__)
    text = path.read_text()
    assert text.count(old) == 1, "an edit must fit the source exactly once"
    mutant = dict(vars(pallas_gpu))
    exec(compile(text.replace(old, new), f"{path} mutant", "exec"), mutant)
    mutant["_RING_BYTES"] = 2 * 2 * 32 * (64 + 8)
    case = cases.make("rows that no expert has", "bfloat16", inputs=32 * 7)
    [got] = products(case, SimpleNamespace(**mutant))
    right = cases.expected(case)
    assert not np.allclose(got, right, rtol=0, atol=cases.TOLERANCE["bfloat16"])


def test_matrices_that_the_kernel_does_not_take_are_named():
    backend = ExpertBackend("pallas_gpu")
    assert why_looped(backend, "gpu", "bfloat16", [(768, 2048), (2048, 768)]) is None
    reason = why_looped(backend, "gpu", "bfloat16", [(360, 2880), (2880, 360)])
    assert reason == "360 inputs: it needs a multiple of 32"
