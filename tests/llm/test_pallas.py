"""Engines whose attention and pages are Pallas's, for TPUs, in the interpreter of JAX."""

from __future__ import annotations

import jax
import pytest

from ssd_jax.errors import InputError
from ssd_jax.kernels import kv_write_tpu
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from tests.checkpoints import tiny_pair
from tests.models.golden import execution_as

SETTINGS = {"slots": 2, "context": 128, "compile_cache": "off", "dtype": "float32"}
SSD = {"mode": "ssd", "k": "2", "budget": "4", "draft_placement": "inline", "verify": "coupled"}
PROMPTS = ["to be or not to be, that is", "xyxyxyxy"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("pallas"), vocab_size=320)


def opened(pair, *, pallas, **settings):
    there = {"scan_layers": True, "window_writes": True, "attention": "xla_static"}
    if pallas:
        there |= {"attention": "pallas_tpu", "kernels": Kernels(interpret=True)}
    with execution_as(**there):
        return LLM(pair[0], draft=pair[1], **SETTINGS | SSD | settings)


def generated(llm, mode):
    settings = [{}, {"temperature": 0.8, "seed": 5}]
    params = [SamplingParams(max_tokens=8, ignore_eos=True, **setting) for setting in settings]
    return [output.token_ids for output in llm.generate(PROMPTS, params, mode=mode)]


def ar(pair, **settings):
    """What the target says alone, by an engine without a draft."""
    none = {"mode": "ar", "k": None, "budget": None, "draft_placement": None}
    return generated(opened([pair[0], None], **none | settings), "ar")


@pytest.mark.more
def test_plain_decoding_with_pallas_leaves_the_text_as_it_is(pair):
    assert ar(pair, pallas=True) == ar(pair, pallas=False)


@pytest.mark.slow
def test_ssd_says_what_the_target_says(pair):
    """Greedy and coupled, beside each other; XLA is the judge of what the target says."""
    llm = opened(pair, pallas=True)
    assert llm.target.model.execution.attention == "pallas_tpu"
    assert generated(llm, "ssd") == ar(pair, pallas=False)


@pytest.mark.slow
def test_devices_that_share_the_heads_say_what_one_says(pair):
    assert ar(pair, pallas=True, mesh="tensor=2") == ar(pair, pallas=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "page_size"), [("data=2", 16), ("tensor=2", 64), ("data=2,tensor=2", 16)]
)
def test_ssd_over_shared_pages_on_a_grid_says_what_the_target_says(pair, mesh, page_size):
    llm = opened(pair, pallas=True, mesh=mesh, page_size=page_size)
    assert generated(llm, "ssd") == ar(pair, pallas=False)


def one_late(kv_pages, page_table, positions, places=kv_write_tpu._page_and_offset):
    return places(kv_pages, page_table, positions + 1)


@pytest.mark.slow
def test_a_token_that_is_written_one_late_is_seen(pair, monkeypatch):
    monkeypatch.setattr(kv_write_tpu, "_page_and_offset", one_late)
    jax.clear_caches()  # of what an earlier test has traced
    assert ar(pair, pallas=True) != ar(pair, pallas=False)


def test_a_kernel_that_is_not_there_is_an_error_before_anything_is_read():
    with pytest.raises(
        InputError, match="attention = 'pallas_tpu' is not possible: it needs a TPU"
    ):
        LLM("no/such/model", attention="pallas_tpu", compile_cache="off")
