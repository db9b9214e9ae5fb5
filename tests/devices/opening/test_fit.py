"""Bytes by their use, and whether a memory holds them."""

import jax
import pytest

from ssd_jax.devices.opening.fit import ModelBytes, Need
from ssd_jax.devices.opening.sizes import bytes_of_process, bytes_per_device
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import mesh_of
from ssd_jax.testing import tiny
from ssd_jax.tools.aot.chips import Chip
from ssd_jax.tools.aot.parts import build
from ssd_jax.tools.aot.programs import Sizes
from tests.models.golden import FLOAT32

SLOTS, CONTEXT = 4, 384
PAGING = Paging(CONTEXT, SLOTS)


@pytest.fixture(scope="module")
def model():
    config = ModelConfig.from_hf(tiny.config("llama", num_attention_heads=8, num_key_value_heads=2))
    return FunctionalModel(config, FLOAT32, mesh=mesh_of(jax.devices()[:8], 2))


@pytest.mark.parametrize(("limit", "fits"), [(11, False), (12, True), (13, True)])
def test_a_memory_holds_parts_up_to_its_limit(limit, fits):
    need = Need({"weights": 4, "pages": 8}, limit, "this machine")
    assert (need.total, need.fits) == (12, fits)


def test_a_model_holds_the_bytes_of_its_arrays(model):
    held = ModelBytes(model=model, slots=SLOTS, paging=PAGING, size_of=bytes_of_process)
    pages = jax.tree.leaves(model.new_pages(SLOTS, CONTEXT))
    assert held.pages == sum(part.data.nbytes for x in pages for part in x.addressable_shards)
    once = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model.parameter_structs()))
    assert once < held.weights < 8 * once  # some are on every device
    assert held.records > SLOTS * model.config.vocab_size


def test_a_chip_that_is_not_there_holds_what_a_device_holds(model):
    held = ModelBytes(model=model, slots=SLOTS, paging=PAGING, size_of=bytes_per_device)
    chip = Chip(slices={}, memory=0, bandwidth=1.0, flops=1.0, link=1.0)
    sizes = Sizes(slots=SLOTS, context=CONTEXT, k=2, branches=4)
    part = build("target", model, [], chip=chip, places=tuple(range(8)), sizes=sizes)
    assert (part.weights, part.pages) == (held.weights, held.pages)
    assert part.refused.startswith("weights and pages are ")
