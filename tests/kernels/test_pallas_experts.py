"""Products with experts' weights by Pallas for TPUs, in the interpreter of JAX."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ssd_jax.kernels.experts import pallas_tpu
from ssd_jax.kernels.experts.api import backend_for, expert_products, why_looped
from ssd_jax.kernels.experts.estimate import expected_experts, expected_share
from ssd_jax.kernels.linear.quantized import W8A8, Quantized, digits, integer_product, quantize
from tests.kernels import expert_cases as cases

interpreted = pltpu.InterpretParams()


def products(case, weights=None, module=pallas_tpu, **options):
    weights = [case.weight] if weights is None else weights

    def call(x, sizes, weights):
        return module.expert_products_pallas_tpu(x, sizes, weights, used=1.0, interpret=interpreted)

    return [np.asarray(y) for y in jax.jit(call)(case.x, case.sizes, weights)]


@pytest.mark.parametrize("name", cases.SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_near_float64(name, dtype):
    case = cases.make(name, dtype)
    [got] = products(case)
    np.testing.assert_allclose(got, cases.expected(case), rtol=0, atol=cases.TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_few_inputs_have_outputs_side_by_side(dtype):
    case = cases.make("tiles", dtype, inputs=96, outputs=256)
    [got] = products(case)
    np.testing.assert_allclose(got, cases.expected(case), rtol=0, atol=cases.TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["few", "tiles"])
def test_outputs_in_parts_and_two_weights_are_those_of_one(name, monkeypatch):
    case = cases.make(name, "bfloat16", outputs=320)
    [product] = products(case)
    monkeypatch.setattr(pallas_tpu, "_BLOCK_BYTES", 128 * cases.INPUTS * 2)  # 128, 128 and 64
    assert pallas_tpu._part(320, cases.INPUTS * 2) == 128
    parts = products(case, [case.weight, -case.weight])
    np.testing.assert_array_equal(parts[0], product)
    np.testing.assert_array_equal(parts[1], -product)


def test_a_row_has_the_bits_that_it_has_alone():
    case = cases.make("tiles", "float32")
    [among] = products(case)
    for row in (0, 127, 128, 200):
        expert = cases.expert_of(case.sizes)[row]
        alone = SimpleNamespace(
            x=case.x[row : row + 1],
            sizes=np.eye(len(case.sizes), dtype=np.int32)[expert],
            weight=case.weight,
        )
        np.testing.assert_array_equal(products(alone)[0][0], among[row])


def test_weights_of_several_layers_are_read_where_the_layer_has_its_own():
    case = cases.make("few", "bfloat16")
    layers = np.stack([np.full_like(case.weight, np.nan), case.weight])

    def call(x, sizes, layers, layer):
        return pallas_tpu.expert_products_pallas_tpu(
            x, sizes, [layers], layer=layer, used=1.0, interpret=interpreted
        )

    [got] = jax.jit(call)(case.x, case.sizes, layers, jnp.asarray(1))
    np.testing.assert_array_equal(got, products(case)[0])


@pytest.mark.parametrize("kind", [Quantized, W8A8])
def test_int8_products_are_exact(kind):
    case = cases.make("tiles", "float32")
    scales = [quantize(jnp.asarray(matrix)) for matrix in case.weight]
    weight = kind(*(jnp.stack(parts) for parts in zip(*scales, strict=True)))
    [got] = products(case, [weight])
    rows = digits(jnp.asarray(case.x), single=kind is W8A8)
    for expert in range(len(case.sizes)):
        of_expert = np.flatnonzero(cases.expert_of(case.sizes) == expert)
        right = integer_product(rows, kind(weight.values[expert], weight.scales[expert]))
        np.testing.assert_allclose(got[of_expert], np.asarray(right)[of_expert], rtol=1e-6)


def test_int8_is_left_to_xla_where_kernels_cannot_have_it():
    v4, v5e = (SimpleNamespace(device_kind=kind) for kind in ("TPU v4", "TPU v5 lite"))
    backends = {device.device_kind: backend_for("tpu", device) for device in (v4, v5e)}
    assert [backend.name for backend in backends.values()] == ["pallas_tpu"] * 2
    matrices = [(768, 2048, jnp.dtype(jnp.int8)), (2048, 768, jnp.dtype(jnp.int8))]
    assert why_looped(backends["TPU v5 lite"], "tpu", v5e, matrices) is None
    assert "TPU v4" in (why_looped(backends["TPU v4"], "tpu", v4, matrices) or "")
    floats = [(768, 2048, jnp.dtype(jnp.bfloat16))]
    assert why_looped(backends["TPU v4"], "tpu", v4, floats) is None
    case = cases.make("rows that no expert has", "float32")
    weights = [quantize(jnp.asarray(np.nan_to_num(matrix))) for matrix in case.weight]
    weight = Quantized(*(jnp.stack(parts) for parts in zip(*weights, strict=True)))
    [want] = expert_products(case.x, case.sizes, [weight])
    stack = [jax.tree.map(lambda array: array[None], weight)]
    options = {"backend": backends["TPU v4"], "layer": jnp.int32(0)}
    [got] = expert_products(case.x, case.sizes, stack, **options)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", cases.SIZES)
def test_weights_of_experts_with_rows_are_fetched_once_each(name):
    """The pipeline fetches a block where it is another one than that of the step before."""
    sizes = jnp.asarray(cases.SIZES[name].sizes, jnp.int32)
    rows, tile = cases.SIZES[name].rows, 16
    tiles = -(-rows // tile)
    items = pallas_tpu._items(sizes, tile, tiles, tiles + min(len(sizes), rows))
    experts = np.asarray(items.expert)
    fetched = experts[np.append(True, experts[1:] != experts[:-1])].tolist()
    assert fetched == (np.flatnonzero(sizes).tolist() or [0])
    assert np.asarray(items.tile)[np.append(np.diff(items.tile), 1) > 0].tolist() == [*range(tiles)]


def test_rows_are_expected_to_use_as_many_experts_as_they_do_on_average():
    assert expected_experts(128, 1, 8) == pytest.approx(8)
    assert expected_experts(128, 10_000, 8) == pytest.approx(128)
    rng = np.random.default_rng(0)

    def used(rows):
        return len({*np.concatenate([rng.permutation(128)[:8] for _ in range(rows)])})

    for rows in (2, 5, 17):
        average = np.mean([used(rows) for _ in range(500)])
        assert expected_experts(128, rows, 8) == pytest.approx(average, rel=0.02)


@pytest.mark.parametrize("devices", [2, 8])
def test_the_device_with_most_of_the_experts_is_the_one_that_counts(devices):
    rng, held = np.random.default_rng(0), 128 // devices

    def most(rows):
        used = np.unique([rng.permutation(128)[:8] for _ in range(rows)])
        return np.bincount(used // held).max()

    for rows in (1, 5, 17):
        average = np.mean([most(rows) for _ in range(500)])
        assert expected_experts(128, rows, 8, devices) == pytest.approx(average, rel=0.03)
    assert expected_experts(128, 10_000, 8, devices) == pytest.approx(held)


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_that_device_has_the_expected_part_of_the_rows(devices):
    rng, held = np.random.default_rng(0), 128 // devices

    def share(rows):
        chosen = np.concatenate([rng.permutation(128)[:8] for _ in range(rows)])
        busiest = np.bincount(np.unique(chosen) // held).argmax()
        return np.mean(chosen // held == busiest)

    for rows in (1, 5, 17):
        average = np.mean([share(rows) for _ in range(500)])
        assert expected_share(128, rows, 8, devices) == pytest.approx(average, rel=0.05)


def test_products_of_rows_that_are_expected_elsewhere_are_not_in_the_estimate():
    case = cases.make("few", "bfloat16")

    def flops(share):
        def call(x, sizes, weight):
            options = {"used": 1.0, "share": share, "interpret": interpreted}
            return pallas_tpu.expert_products_pallas_tpu(x, sizes, [weight, weight], **options)

        text = str(jax.make_jaxpr(call)(case.x, case.sizes, case.weight))
        return int(re.search(r"CostEstimate\(flops=(\d+)", text)[1])

    assert flops(1.0) == 2 * 2 * len(case.x) * cases.INPUTS * cases.OUTPUTS
    assert flops(0.25) == flops(1.0) // 4


MUTANTS = {
    "a row of the next expert": ("row < ends[item]", "row <= ends[item]"),
    "a row of the expert before": ("row >= starts[item]", "row + 1 >= starts[item]"),
    "rows of the first tile": ("row = tiles[item] * tile", "row = 0 * tiles[item] * tile"),
    "a tile that is not emptied": ("tiles[item] != before", "tiles[item] < before"),
    "weights of the first expert": ("(experts[i], n, 0)", "(0, n, 0)"),
    "an expert's last tile left out": ("starts // tile + 1, 0)", "starts // tile, 0)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    old, new = MUTANTS[name]
    path = Path(pallas_tpu.__file__)
    text = path.read_text()
    assert text.count(old) == 1, "an edit must fit the source exactly once"
    mutant = dict(vars(pallas_tpu))
    exec(compile(text.replace(old, new), f"{path} mutant", "exec"), mutant)
    case = cases.make("tiles", "float32")
    [got] = products(case, module=SimpleNamespace(**mutant))
    assert not np.allclose(got, cases.expected(case), rtol=0, atol=cases.TOLERANCE["float32"])
