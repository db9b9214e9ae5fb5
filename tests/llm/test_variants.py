"""An engine whose host chooses programs of the law, as on accelerators, writes the same text."""

import dataclasses

import pytest

from ssd_jax import LLM, SamplingParams
from ssd_jax.devices.branches import expansion_programs
from ssd_jax.devices.programs import paged as paged_programs
from ssd_jax.models.execution import Execution
from tests.checkpoints import tiny_pair

PROMPTS = ["to be or not to be, that is the question", "xyxyxyxyxyxyxyxyxyxy", "one two one two"]
HOT = {"temperature": 0.8, "seed": 5}
WAVES = {
    "greedy": [{}, {}],
    "sampled": [{}, HOT],
    "truncated": [HOT | {"top_p": 0.9}, HOT | {"top_k": 4}, {}],
    "full": [{"repetition_penalty": 1.3, "min_tokens": 12}, HOT | {"presence_penalty": 0.5}, {}],
}
"""Requests that run together, by the variant that they need."""
MODES = {
    "sd": {"k": "3"},
    "ssd": {
        "k": "2",
        "budget": "6",
        "verify": "coupled",
        "dtype": "float32",
        "draft_placement": "inline",
    },
}
DRAWING = {"accept", "start", "step", "expand", "grow"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tiny_pair.write(tmp_path_factory.mktemp("variants"))


def load(checkpoints, mode):
    target, draft = checkpoints
    return LLM(
        target, mode=mode, draft=draft, slots=3, context=128, compile_cache="off", **MODES[mode]
    )


def texts(llm, wave):
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **setting) for setting in WAVES[wave]]
    return [output.token_ids for output in llm.generate(PROMPTS[: len(params)], params)]


@pytest.mark.more
@pytest.mark.parametrize("mode", ["sd", pytest.param("ssd", marks=pytest.mark.slow)])
def test_texts_are_those_of_programs_that_decide(checkpoints, monkeypatch, mode):
    usual, plain, used = Execution.for_platform, load(checkpoints, mode), []

    def as_elsewhere(platform, dtype, **choices):
        elsewhere = usual("tpu", dtype).variants
        return dataclasses.replace(usual(platform, dtype, **choices), variants=elsewhere)

    monkeypatch.setattr(Execution, "for_platform", as_elsewhere)
    for module in (paged_programs, expansion_programs):
        fitting = module.cheapest_variant

        def noted(*arguments, fitting=fitting):
            used.append(fitting(*arguments))
            return used[-1]

        monkeypatch.setattr(module, "cheapest_variant", noted)
    choosing = load(checkpoints, mode)
    for wave in WAVES:
        expected = texts(plain, wave)
        used.clear()
        assert texts(choosing, wave) == expected
        batched = {name for name in used if name[0] in DRAWING and name[:2] != ("accept", 1)}
        assert {name[-1] for name in batched if name[0] == "accept"} >= {wave}
        kinds = {name[0] for name in batched}
        assert kinds >= ({"accept", "start", "step"} if mode == "sd" else {"accept", "expand"})
