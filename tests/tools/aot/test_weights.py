"""Weights of few bits in groups of inputs: what compilers make of the products with them."""

import functools

import pytest

from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.tools.aot import chips
from ssd_jax.tools.aot.configurations import read_configuration
from ssd_jax.tools.aot.parts import ChipSlice, build
from ssd_jax.tools.aot.programs import Sizes
from tests.tools.aot import gpus

pytestmark = [pytest.mark.aot, pytest.mark.shipped]

SIZES = Sizes(slots=1, context=8192, k=4, branches=16)
FORMS = {
    "int4": GroupForm("int4", 128),
    "int4, groups of 32 with minima": GroupForm("int4", 32, minima=True),
    "int8, groups of 16": GroupForm("int8", 16),
    "float8, blocks": GroupForm("float8_e4m3fn", 128),
    "float8, rows": GroupForm("float8_e4m3fn", 4096),
}
QUICK = ("v5e", "int4"), ("v6e", "float8, blocks")


@functools.cache
def forward(chip, weights, devices):
    """Llama-3.1-8B on some devices, with the forward that verifies four tokens."""
    slice_ = ChipSlice(name=chip, devices=chips.devices(chip, devices))
    places = tuple(range(devices))
    config = read_configuration("llama-3.1-8b")
    model = slice_.model(config, "bfloat16", places, weights=FORMS.get(weights))
    name = "forward", SIZES.k
    part = build("target", model, [name], chip=slice_.chip, places=places, sizes=SIZES)
    return part, part.programs[name]


@pytest.mark.parametrize(
    ("chip", "weights"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in [(chip, form) for chip in ("v5e", "v6e") for form in FORMS]
    ],
)
def test_a_forward_on_tpus_reads_numbers_and_scales_once(chip, weights):
    part, program = forward(chip, weights, 4)
    assert program.work.moved <= part.weights + part.pages
    assert program.temporaries < 2**24


@pytest.mark.slow
@pytest.mark.skipif(bool(gpus.WHY), reason=gpus.WHY or "there is one")
@pytest.mark.parametrize(("weights", "share"), [("int4", 0.7), ("float8, blocks", 0.9)])
def test_a_forward_on_gpus_moves_less_than_in_bfloat16(weights, share):
    (_, quantised), (_, plain) = (forward("h100", form, 1) for form in (weights, "bfloat16"))
    assert quantised.work.moved < share * plain.work.moved
