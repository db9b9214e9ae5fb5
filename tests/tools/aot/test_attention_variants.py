"""Kernels of attention with windows, soft caps and sinks compile for chips that are not there."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import pytest

from ssd_jax.kernels.tree_attention.variant import AttentionVariant
from ssd_jax.models.sharding import mesh_of
from ssd_jax.tools.aot import chips
from tests import support
from tests.tools.aot import gpus

pytestmark = pytest.mark.aot

FORMS = ("static window", "window of an array")


def compile_variant(chip: str, platform: str, backend: str, form: str) -> None:
    """Compiles a kernel with all that a variant may have."""
    place = support.Place(chip, platform, mesh_of(chips.devices(chip)))
    function, arguments = support.attention(backend)
    heads = arguments[0].shape[2]
    window = 70 if form == FORMS[0] else jnp.asarray(70, jnp.int32)
    variant = AttentionVariant(window=window, soft_cap=50.0, scale=0.2, sinks=jnp.zeros(heads))
    with jax.default_device(place.device):
        place.compile(function, (*arguments, variant))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
def test_the_kernel_for_tpus_compiles(chip, form):
    compile_variant(chip, "tpu", "pallas_tpu", form)


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus.WHY), reason=str(gpus.WHY))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["pallas_gpu", "pallas_mma"])
def test_the_kernels_for_gpus_compile(backend, form):
    """In a process of its own: JAX compiles kernels for one generation of GPUs in each."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(compile_variant, "h100", "gpu", backend, form).result()
