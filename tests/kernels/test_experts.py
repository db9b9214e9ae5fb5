"""Products with experts' weights: near the reference, and a row's bits its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ssd_jax.kernels.experts import api, reference, xla
from ssd_jax.kernels.experts.api import ExpertBackend, expert_products
from ssd_jax.kernels.head_shards import HeadShards
from ssd_jax.kernels.linear.quantized import W8A8, Quantized, quantize
from tests.selection import cases

INPUTS, OUTPUTS = 40, 24
SIZES = {
    "some without rows": (3, 0, 11, 1, 0, 5),
    "all to one": (0, 0, 0, 20, 0, 0),
    "rows beyond": (2, 1, 0, 0, 9, 0),
    "none": (0, 0, 0, 0, 0, 0),
    "one expert": (20,),
}
ERRORS = {"float32": 1e-6, "bfloat16": 2e-2, "int8": 3e-2, "w8a8": 6e-2}
"""Most error of a product, in the largest one."""


def weight(dtype, experts, outputs=OUTPUTS, inputs=INPUTS, seed=0):
    """A weight of each expert, as products take it, and its values."""
    dense = np.random.default_rng(seed).normal(size=(experts, outputs, inputs)).astype(np.float32)
    if dtype in ("float32", "bfloat16"):
        return jnp.asarray(dense, dtype), dense
    made = jax.jit(quantize)(dense)
    return (W8A8(*made) if dtype == "w8a8" else made), dense


def states(rows, inputs=INPUTS, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, inputs)).astype(np.float32)


def products(x, sizes, *weights):
    run = jax.jit(lambda x, sizes, weights: expert_products(x, sizes, weights))
    return [np.asarray(y) for y in run(x, jnp.asarray(sizes, jnp.int32), list(weights))]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_are_the_references(dtype, sizes):
    x, experts = states(20), len(sizes)
    (one, dense), (other, wider) = weight(dtype, experts), weight(dtype, experts, 33, seed=2)
    for got, values in zip(products(x, sizes, one, other), (dense, wider), strict=True):
        want = reference.product(x, np.asarray(sizes, np.int32), values)
        np.testing.assert_allclose(got, want, atol=ERRORS[dtype] * max(1, np.abs(want).max()))
        assert not got[sum(sizes) :].any()


@pytest.mark.shipped
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of processors")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_processor_makes_no_other_copy_of_all_experts(dtype):
    made = jnp.ones((8, 128, 256), dtype)
    run = jax.jit(lambda x, sizes, weight: xla.products(x, sizes, [weight]))
    compiled = run.lower(jnp.ones((8, 256)), jnp.ones(8, jnp.int32), made).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < made.nbytes / 2


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_weights_of_experts_without_rows_are_not_read(dtype):
    """Nor is a row with numbers that are none seen by others."""
    sizes, x = (3, 0, 4, 0), states(9)
    made, _ = weight(dtype, 4)
    bad = jnp.asarray([0, np.nan, 0, np.nan], jnp.float32)[:, None]
    if dtype == "float32":
        made = made + bad[:, :, None]
    else:
        made = Quantized(made.values, made.scales + bad)
    [y] = products(x, sizes, made)
    assert np.isfinite(y).all()
    x[4] = np.nan
    [other] = products(x, sizes, made)
    np.testing.assert_array_equal(np.delete(other, 4, 0), np.delete(y, 4, 0))
    assert np.isnan(other[4]).all()


@pytest.mark.shipped
@pytest.mark.parametrize("dtype", cases(ERRORS, "float32", "bfloat16", "int8"))
@pytest.mark.parametrize(("experts", "inputs"), cases([(4, 96), (1, 2048), (3, 257)], (4, 96)))
def test_a_row_has_the_same_bits_beside_any_rows(dtype, experts, inputs):
    """Whatever rows of its own expert and of others there are, and how many."""
    rng = np.random.default_rng(3)
    x, (made, _) = states(60, inputs), weight(dtype, experts, 72, inputs)
    alone = [products(x, np.eye(experts, dtype=int)[e] * 60, made)[0] for e in range(experts)]
    for rows in (1, 2, 3, 5, 8, 9, 17, 33, 60):
        expert = np.sort(rng.integers(0, experts, rows))
        chosen = rng.permutation(60)[:rows]
        [y] = products(x[chosen], np.bincount(expert, minlength=experts), made)
        for row, (e, source) in enumerate(zip(expert, chosen, strict=True)):
            np.testing.assert_array_equal(y[row], alone[e][source])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_each_of_eight_devices_multiplies_with_all_weights_of_the_layer(dtype, monkeypatch):
    """With XLA in the kernel's place."""
    sizes, shapes = (3, 0, 11, 1), []

    def kernel(x, group_sizes, weights, layer):
        [weight] = [jax.tree.map(lambda array: array[layer], stack) for stack in weights]
        shapes.append(jax.tree.leaves(weight)[0].shape)
        return xla.products(x, group_sizes, [weight])

    monkeypatch.setattr(api, "_kernel", lambda *_: kernel)
    layers = [weight(dtype, 4, seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *(made for made, _ in layers))
    backend = ExpertBackend("pallas_tpu", HeadShards("t", mesh=Mesh(jax.devices()[:8], ("t",))))
    x = states(20)

    def call(x, sizes, stacked, layer):
        return expert_products(x, sizes, [stacked], backend=backend, layer=layer)

    [got] = jax.jit(call)(x, jnp.asarray(sizes, jnp.int32), stacked, jnp.asarray(1))
    want = reference.product(x, np.asarray(sizes, np.int32), layers[1][1])
    np.testing.assert_allclose(got, want, atol=ERRORS[dtype] * np.abs(want).max())
    assert {*shapes} == {(4, OUTPUTS, INPUTS)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_more_turns_than_there_are_blocks_change_nothing(sizes):
    """As on accelerators, where a loop has as many as there may be."""
    x, (made, _) = states(20), weight("float32", len(sizes))
    arguments = jnp.asarray(x), jnp.asarray(sizes, jnp.int32), [made]
    [want] = jax.jit(functools.partial(xla._in_blocks, rows=8))(*arguments)
    most = 20 // 8 + min(len(sizes), 20)
    [got] = jax.jit(functools.partial(xla._in_blocks, rows=8, turns=most))(*arguments)
    np.testing.assert_array_equal(got, want)
