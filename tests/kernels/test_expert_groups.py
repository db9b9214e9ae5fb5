"""Products with experts' weights in groups, by XLA and by the kernel for TPUs, interpreted."""

import dataclasses
import importlib
import sys
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from ssd_jax.kernels.experts import groups, pallas_tpu, reference, tpu_operands, xla
from ssd_jax.kernels.experts.groups import ExpertGroups, dequantize, device_form
from ssd_jax.kernels.linear.group_form import FLOAT4, GroupForm
from ssd_jax.kernels.linear.kinds import E2M1
from tests.kernels import expert_cases as cases
from tests.kernels.expert_groups import FORMS, made
from tests.selection import cases as chosen

INPUTS, OUTPUTS = 192, 160
interpreted = pltpu.InterpretParams()


def by_kernel(x, sizes, weights, module=pallas_tpu, layer=0):
    return module.expert_products_pallas_tpu(
        x, sizes, weights, layer=layer, used=1.0, interpret=interpreted
    )


BACKENDS = {"xla": xla.products, "kernel": by_kernel}


def products(backend, x, sizes, *weights, **options):
    call = jax.jit(lambda x, sizes, weights: BACKENDS[backend](x, sizes, weights, **options))
    return [np.asarray(y) for y in call(x, jnp.asarray(sizes, jnp.int32), list(weights))]


def states(rows, inputs=INPUTS, seed=1):
    """Values that bfloat16 has."""
    x = np.random.default_rng(seed).normal(size=(rows, inputs))
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("name", FORMS)
def test_values_are_those_of_numbers_and_scales(name):
    for inputs in (INPUTS, 96):
        weight, dense = made(FORMS[name], 2, 40, inputs)
        got = jax.jit(dequantize, static_argnums=1)(weight, inputs)
        np.testing.assert_array_equal(np.asarray(got, np.float32).swapaxes(1, 2), dense)


def test_every_float_of_four_bits_has_its_value_under_any_scale():
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 4))
    form = GroupForm(FLOAT4, 32)
    values = groups.stored_values(form, codes)
    for exponent in (2, 3, 90, 127, 128, 251):
        scales = groups.stored_scales(form, np.full((1, 2), exponent, np.uint8))
        got = jax.jit(dequantize, static_argnums=1)(ExpertGroups(values, scales, None, 32, 1), 64)
        want = np.asarray(E2M1)[codes[0]] * 2.0 ** (exponent - 127)
        np.testing.assert_array_equal(np.asarray(got, np.float64)[:, 0], want)


def test_groups_are_cut_where_a_device_has_parts_of_them():
    """As the down projection of gpt-oss on eight devices, which have 360 of 2,880 inputs each."""
    assert device_form(FORMS["mxfp4"], 2880) == FORMS["mxfp4"]
    assert device_form(FORMS["mxfp4"], 360) == GroupForm(FLOAT4, 8)
    assert device_form(FORMS["mxfp4"], 1440) == FORMS["mxfp4"]
    assert device_form(GroupForm("int4", 2880), 2880) == GroupForm("int4", 2880)
    assert device_form(GroupForm("int4", 96), 192) == GroupForm("int4", 32)
    assert device_form(FORMS["mxfp4"], 90) is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", chosen(cases.SIZES, "few", "tiles"))
@pytest.mark.parametrize("name", FORMS)
def test_products_are_the_references(name, sizes, backend):
    sizes, rows = cases.SIZES[sizes]
    for inputs, outputs in ((INPUTS, OUTPUTS), (96, 256)):
        x, (weight, dense) = states(rows, inputs), made(FORMS[name], len(sizes), outputs, inputs)
        [got] = products(backend, x, sizes, weight)
        want = reference.product(x, np.asarray(sizes, np.int32), dense)
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))
        assert not got[sum(sizes) :].any()


@pytest.mark.parametrize("name", ["mxfp4", "int4, 128, minima"])
def test_outputs_in_parts_and_weights_of_two_kinds_are_those_of_one(name, monkeypatch):
    sizes, rows = cases.SIZES["few"]
    x, (weight, _) = states(rows), made(FORMS[name], len(sizes), 320, INPUTS)
    other, _ = made(FORMS["int8"], len(sizes), 320, INPUTS)
    [product] = products("kernel", x, sizes, weight)
    monkeypatch.setattr(pallas_tpu, "_BLOCK_BYTES", 128 * INPUTS * 2)  # 128, 128 and 64
    first, second, third = products("kernel", x, sizes, weight, weight, other)
    np.testing.assert_array_equal(first, product)
    np.testing.assert_array_equal(second, product)
    np.testing.assert_array_equal(third, products("kernel", x, sizes, other)[0])


@pytest.mark.shipped
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mxfp4", "int4", "float8"])
def test_a_row_has_the_same_bits_beside_any_rows(name, backend):
    rng, experts = np.random.default_rng(3), 3
    x, (weight, _) = states(40), made(FORMS[name], experts, OUTPUTS, INPUTS)
    of_all = [40 * np.eye(experts, dtype=int)[expert] for expert in range(experts)]
    alone = [products(backend, x, sizes, weight)[0] for sizes in of_all]
    for rows in (1, 2, 5, 9, 17, 40):
        expert = np.sort(rng.integers(0, experts, rows))
        taken = rng.permutation(40)[:rows]
        [got] = products(backend, x[taken], np.bincount(expert, minlength=experts), weight)
        for row, (e, source) in enumerate(zip(expert, taken, strict=True)):
            np.testing.assert_array_equal(got[row], alone[e][source])


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_experts_without_rows_are_not_read(backend):
    sizes, rows = cases.SIZES["few"]
    x, (weight, dense) = states(rows), made(FORMS["int4"], len(sizes), OUTPUTS, INPUTS)
    unread = np.asarray(sizes)[:, None, None] == 0
    [got] = products(
        backend,
        x,
        sizes,
        dataclasses.replace(weight, scales=jnp.where(unread, jnp.nan, weight.scales)),
    )
    want = reference.product(x, np.asarray(sizes, np.int32), dense)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_weights_of_several_layers_are_read_where_the_layer_has_its_own():
    sizes, rows = cases.SIZES["few"]
    x = states(rows)
    layers = [made(FORMS["mxfp4"], len(sizes), OUTPUTS, INPUTS, seed)[0] for seed in range(2)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    for layer, weight in enumerate(layers):
        [got] = products("kernel", x, sizes, stacked, layer=layer)
        np.testing.assert_array_equal(got, products("kernel", x, sizes, weight)[0])


MUTANTS = {
    "the scale of the next group": (tpu_operands, "+ place // eights", "+ (place // eights ^ 1)"),
    "scales of the first block": (tpu_operands, "block * (8 // eights) +", "0 * block +"),
    "the other nibble of a byte": (groups, "28 - 4 * place", "28 - 4 * (place ^ 1)"),
    "zeros left out": (groups, "bits == _ZERO", "bits == 0"),
    "numbers without a sign": (groups, "(_SIGN | _FIELDS)", "(_FIELDS)"),
    "weights of the first expert": (pallas_tpu, "(experts[i], 0, n)", "(0, 0, n)"),
    "weights of the next expert": (pallas_tpu, "(experts[i], 0, n)", "(experts[i] + 1, 0, n)"),
    "words of the block before": (
        tpu_operands,
        "pl.multiple_of(block * LEAST_GROUP, LEAST_GROUP)",
        "pl.multiple_of(block // 2 * LEAST_GROUP, LEAST_GROUP)",
    ),
}


def kernel_with(module: ModuleType, old: str, new: str) -> ModuleType:
    """The kernel's module, with an edit in it or in what it imports."""
    text = importlib.util.find_spec(module.__name__).loader.get_source(module.__name__)
    assert text.count(old) == 1, "an edit must fit the source exactly once"
    names = [module.__name__ for module in (groups, tpu_operands, pallas_tpu)]
    usual = {name: sys.modules[name] for name in names}
    try:
        for name in names:
            fresh = ModuleType(name)
            fresh.__file__ = usual[name].__file__
            source = importlib.util.find_spec(name).loader.get_source(name)
            sys.modules[name] = fresh
            source = source.replace(old, new) if name == module.__name__ else source
            exec(compile(source, f"{name} mutant", "exec"), vars(fresh))
        return fresh
    finally:
        sys.modules.update(usual)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name):
    mutant = kernel_with(*MUTANTS[name])
    sizes, rows = cases.SIZES["few"]
    x, (weight, dense) = states(rows), made(FORMS["mxfp4"], len(sizes), OUTPUTS, INPUTS)
    of_mutant = SimpleNamespace(expert_products_pallas_tpu=mutant.expert_products_pallas_tpu)
    weight = mutant.ExpertGroups(**vars(weight))
    [got] = products("kernel", x, sizes, weight, module=of_mutant)
    want = reference.product(x, np.asarray(sizes, np.int32), dense)
    assert not np.allclose(got, want, atol=1e-3 * np.abs(want).max())
