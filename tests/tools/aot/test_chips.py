"""What devices can do, and the least that a program takes on them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from ssd_jax.errors import InputError
from ssd_jax.tools.aot import chips
from ssd_jax.tools.aot.chips import Chip, roofline
from ssd_jax.tools.aot.traffic import Collective, ProgramWork

CHIP = Chip(slices={}, memory=1, bandwidth=1e9, flops=1e12, link=1e8)


def work(flops=0, moved=0, collectives=(), of_int8=0):
    return ProgramWork(flops, of_int8, moved, tuple(collectives))


@pytest.mark.parametrize(
    ("flops", "moved", "seconds", "bound"),
    [(10**9, 10**9, 1.0, "memory"), (5 * 10**12, 10**9, 5.0, "arithmetic")],
)
def test_the_longer_of_memory_and_arithmetic_hides_the_other(flops, moved, seconds, bound):
    found = roofline(CHIP, work(flops, moved))
    assert (found.seconds, found.bound) == (seconds, bound)


def test_products_of_float32_take_several():
    assert roofline(CHIP, work(10**12), passes=6).seconds == pytest.approx(6)
    both = roofline(CHIP, work(3 * 10**12, of_int8=10**12), passes=6)
    assert both.seconds == pytest.approx(2 * 6 + 1 / 2)  # int8 twice as fast


def test_collectives_come_on_top_around_a_ring_both_ways():
    sent = Collective(nbytes=8 * 10**8, devices=4, runs=3, kind="all-gather")
    found = roofline(CHIP, work(moved=10**9, collectives=[sent]))
    assert found.links == pytest.approx(3 * (8e8 * 3 / 4) / 2e8)
    assert found.seconds == pytest.approx(1 + found.links)
    assert found.bound == "links"


def test_a_sum_goes_around_twice_and_small_ones_take_hops():
    one = Collective(nbytes=4, devices=8, runs=10, kind="all-gather")
    both = Collective(nbytes=4, devices=8, runs=10, kind="all-reduce")
    assert roofline(CHIP, work(collectives=[one])).links == pytest.approx(10 * 4e-6)
    assert roofline(CHIP, work(collectives=[both])).links == pytest.approx(20 * 4e-6)
    alone = Collective(nbytes=10**9, devices=1, runs=1, kind="all-reduce")
    assert roofline(CHIP, work(collectives=[alone])).links == 0


def test_permutes_are_to_neighbours_and_hide_behind_products():
    sent = Collective(nbytes=2 * 10**8, devices=8, runs=3, kind="collective-permute")
    few = Collective(nbytes=4, devices=8, runs=5, kind="collective-permute")
    found = roofline(CHIP, work(moved=10**9, collectives=[sent, few]))
    assert found.permutes == pytest.approx(3 * 2 + 5e-6)
    assert (found.seconds, found.bound) == (found.permutes, "permutes")
    assert roofline(CHIP, work(moved=10**11, collectives=[sent])).seconds == pytest.approx(100)


@pytest.mark.aot
@pytest.mark.parametrize("name", chips.TPUS)
def test_the_memory_of_a_tpu_is_what_its_compiler_says(name):
    gib = 2**30
    (device,) = chips.devices(name)
    much = jax.ShapeDtypeStruct((120 * gib,), jnp.int8, sharding=SingleDeviceSharding(device))
    with pytest.raises(jax.errors.JaxRuntimeError, match="exceeds available HBM") as found:
        jax.jit(lambda x: x[:8]).trace(much).lower().compile()
    said = re.search(r"available HBM \(([\d.]+)G\)", str(found.value))
    assert float(said[1]) == pytest.approx(chips.CHIPS[name].memory / gib, abs=0.01)


def test_a_chip_that_nobody_knows_is_refused_with_those_that_there_are():
    with pytest.raises(InputError, match="chip = 'v5' is unknown; did you mean 'v5"):
        chips.devices("v5")
    with pytest.raises(InputError, match="one of v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, b200"):
        chips.devices("abacus")


def test_more_devices_than_a_slice_has_are_refused():
    with pytest.raises(InputError, match=r"devices = 17 are more than .* v6e .* at most 16"):
        chips.devices("v6e", 17)


def test_without_a_compiler_the_error_says_what_has_it(monkeypatch):
    def missing(*_args, **_options):
        raise RuntimeError("libtpu.so not found")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    with pytest.raises(InputError, match=r"no compiler for v5e: libtpu.so not found; .*\[tpu\]"):
        chips.devices("v5e", 4)
