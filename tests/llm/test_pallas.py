"""Engines whose attention and pages are Pallas's, for TPUs, in the interpreter of JAX."""

from __future__ import annotations

import dataclasses

import pytest

from ssd_jax.kernels.head_shards import TpuKernels
from ssd_jax.llm import LLM
from ssd_jax.models.execution import Execution
from ssd_jax.testing import tiny
from tests.llm.test_speculative import outputs

SETTINGS = {"slots": 2, "context": 128, "compile_cache": "off", "dtype": "float32"}
SSD = {"mode": "ssd", "k": "2", "budget": "4", "draft_placement": "inline", "verify": "coupled"}
PROMPTS = ["to be or not to be, that is", "xyxyxyxy"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root, shape = tmp_path_factory.mktemp("pallas"), {"vocab_size": 320}
    names = {"target": 0.0, "draft": 0.04}
    return [str(tiny.write_checkpoint(root / n, noise=x, **shape)) for n, x in names.items()]


def opened(pair, *, pallas, **settings):
    usual = Execution.for_platform

    def as_on_tpus(platform, compute, **choices):
        there = {"scan_layers": True, "window_writes": True, "attention": "xla_static"}
        if pallas:
            there |= {"attention": "pallas_tpu", "kernels": TpuKernels(interpret=True)}
        return dataclasses.replace(usual(platform, compute, **choices), **there)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Execution, "for_platform", as_on_tpus)
        return LLM(pair[0], draft=pair[1], **SETTINGS | SSD | settings)


def said(llm, mode):
    from ssd_jax import SamplingParams

    each = [{}, {"temperature": 0.8, "seed": 5}]
    requests = [
        llm.request(prompt, SamplingParams(max_tokens=8, ignore_eos=True, **settings), index)
        for index, (prompt, settings) in enumerate(zip(PROMPTS, each, strict=True))
    ]
    return [output.token_ids for output in outputs(llm, requests, mode)]


MESHES = [None, pytest.param("data=2,tensor=2", marks=pytest.mark.slow)]


@pytest.mark.parametrize("mesh", MESHES)
def test_ssd_says_what_the_target_says(pair, mesh):
    """Greedy and coupled, beside each other; XLA is the judge of what the target says."""
    llm = opened(pair, pallas=True, mesh=mesh)
    assert llm.target.model.execution.attention == "pallas_tpu"
    ssd = said(llm, "ssd")
    assert ssd == said(llm, "ar")
    assert ssd == said(opened(pair, pallas=False, mesh=mesh), "ar")
