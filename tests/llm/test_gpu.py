"""Whole engines on a GPU: every mode says the same there, bit for bit."""

from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from tests.checkpoints import tiny_pair

pytestmark = [pytest.mark.gpu, pytest.mark.shipped]

PROMPTS = ["to be or not to be, that is", "xyxyxyxyxyxy", "one two " * 63, "?"]
"""One of which ends where its text begins another block of attention."""
SETTINGS = [{}, {"temperature": 0.8, "seed": 5}, {"repetition_penalty": 1.3, "min_tokens": 9}, {}]
SHAPE = {"head_dim": 64, "hidden_size": 64, "intermediate_size": 96}
SHAPE |= {"max_position_embeddings": 2048}


@pytest.fixture(scope="module", autouse=True)
def _a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU")


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def pair(request, tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp(request.param), request.param, **SHAPE)


def asked(llm, mode, **more):
    always = {"max_tokens": 24, "ignore_eos": True} | more
    params = [SamplingParams(**always, **settings) for settings in SETTINGS]
    return llm.generate(PROMPTS, params, mode=mode)


def generated(llm, mode):
    return [output.token_ids for output in asked(llm, mode)]


def margins(llm):
    """Tokens, and by how much the likeliest one was likelier than the next at each place."""
    found = [(output.token_ids, output.logprobs) for output in asked(llm, "ar", logprobs=2)]
    return [
        (tokens, [beside.top[0][1] - beside.top[1][1] for beside in logprobs])
        for tokens, logprobs in found
    ]


def opened(pair, **settings):
    usual = {"slots": 2, "context": 2048, "mode": "ssd", "draft": pair[1], "k": 3}
    return LLM(pair[0], **usual | {"verify": "coupled"} | settings)


@pytest.mark.parametrize("attention", ["xla", "auto"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_mode_on_a_gpu_says_the_same_bit_for_bit(pair, dtype, attention):
    if attention == "auto" and dtype == "float32":
        pytest.skip("the kernels read bfloat16")
    placed = {"draft_placement": "inline", "budget": 6}
    with opened(pair, dtype=dtype, attention=attention, exact="bitwise", **placed) as llm:
        plain = generated(llm, "ar")
        assert generated(llm, "sd") == plain
        assert generated(llm, "ssd") == plain
    assert all(one != other for one, other in itertools.combinations(plain, 2))


def test_a_draft_on_the_host_prepares_what_the_gpu_verifies(pair):
    with opened(
        pair, dtype="bfloat16", draft_placement="process", draft_devices="cpu", exact="bitwise"
    ) as llm:
        assert generated(llm, "ssd") == generated(llm, "ar")


def test_pages_that_slots_share_say_the_same(pair):
    placed = {"draft_placement": "inline", "budget": 6, "exact": "bitwise", "dtype": "bfloat16"}
    with (
        opened(pair, page_size=64, attention="xla", **placed) as shared,
        opened(pair, page_size=64, **placed) as kernel,
    ):
        assert generated(shared, "ssd") == generated(shared, "ar")
        assert generated(kernel, "ssd") == generated(kernel, "ar")


TREES = {
    "sd": {"mode": "sd"},
    "ssd": {"draft_placement": "inline", "budget": 6},
    "ssd, the draft on the host": {"draft_placement": "process", "draft_devices": "cpu"},
}


@pytest.mark.parametrize("attention", ["xla", "auto"])
@pytest.mark.parametrize("mode", TREES)
def test_trees_on_a_gpu_say_what_it_says_token_by_token(pair, mode, attention):
    """Up to a token that is nearly as likely as another: a tree's keys are summed in another
    order."""
    with opened(pair, dtype="bfloat16", attention=attention, tree_nodes=9, **TREES[mode]) as llm:
        plain, found = margins(llm), asked(llm, mode.partition(",")[0])
    for output, (tokens, margin), settings in zip(found, plain, SETTINGS, strict=True):
        forks = [place for place, token in enumerate(output.token_ids) if token != tokens[place]]
        assert settings or not forks or margin[forks[0]] < 0.05
    assert sum(output.metrics["tree_rounds"] or 0 for output in found) > 20
    accepted = [len(output.metrics["acceptance_histogram"] or []) for output in found]
    assert max(accepted) > 2  # a path of two nodes was taken


@pytest.mark.parametrize("verify", ["ratio", "block"])
@pytest.mark.parametrize("nodes", [0, 9])
def test_a_draft_that_is_the_target_is_accepted(pair, verify, nodes):
    """p / q is 1 but for rounding, whatever filters: no q may get lost, and no noise be another."""
    params = SamplingParams(max_tokens=30, temperature=0.8, top_k=40, seed=3, ignore_eos=True)
    settings = {"mode": "sd", "proposal_support": "full", "verify": verify, "dtype": "float32"}
    settings |= {"tree_nodes": nodes} if nodes else {}
    with opened((pair[0], pair[0]), **settings) as llm:
        found = llm.generate(PROMPTS, params)
    by_position = [output.metrics["acceptance_by_position"] for output in found]
    accepted, judged = np.concatenate(by_position).sum(axis=0)
    assert accepted > 0.9 * judged


def test_a_gpu_says_in_float32_what_a_processor_does(pair):
    """Up to a token that is as likely as another."""
    plain = {"dtype": "float32", "mode": "ar", "draft": None, "k": None, "verify": "ratio"}
    with opened(pair, **plain) as llm:
        here = generated(llm, "ar")
    script = f"from tests.llm.test_gpu import *; print(margins(opened({pair}, **{plain})))"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    for tokens_here, (tokens, margin) in zip(
        here, ast.literal_eval(there.stdout.splitlines()[-1]), strict=True
    ):
        forks = [place for place, token in enumerate(tokens_here) if token != tokens[place]]
        assert not forks or margin[forks[0]] < 1e-3
