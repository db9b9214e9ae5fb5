"""Speculative decoding on tiny models: the same text as autoregressive decoding, whatever drafts.

Every factor below meets every other one in some case; all combinations would say no more.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from ssd_jax.devices.draft import programs as draft_programs
from ssd_jax.errors import InputError
from ssd_jax.llm.llm import LLM
from ssd_jax.loading import load
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.sampling.rules import RULES
from ssd_jax.testing import tiny
from tests.checkpoints import tiny_pair
from tests.llm.runs import outputs, requests

FACTORS = {
    "family": ("llama", "qwen2", "qwen3"),
    "dtype": ("float32", "bfloat16", "int8"),
    "drafter": ("model", "ngram"),
    "verify": ("ratio", "block", "coupled"),
    "k": (1, 3, 8),
}
CASES = [
    ("llama", "float32", "ngram", "ratio", 1),
    ("llama", "bfloat16", "ngram", "coupled", 3),
    ("llama", "int8", "model", "ratio", 8),
    ("qwen2", "float32", "model", "ratio", 3),
    ("qwen2", "bfloat16", "ngram", "ratio", 8),
    ("qwen2", "int8", "ngram", "coupled", 1),
    ("qwen3", "float32", "ngram", "coupled", 8),
    ("qwen3", "bfloat16", "model", "coupled", 1),
    ("qwen3", "int8", "ngram", "ratio", 3),
    ("llama", "float32", "model", "block", 3),
    ("qwen2", "bfloat16", "ngram", "block", 1),
    ("qwen3", "int8", "model", "block", 8),
]
"""A covering set of strength two, found by hand and checked below."""
MARKS = {7: (), **dict.fromkeys((2, 3, 8, 9), pytest.mark.more)}
"""With those of CI each family and dtype, and all of a draft model."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(target, draft that agrees with it more often than not) of each family."""
    root = tmp_path_factory.mktemp("speculative")
    return {family: tiny_pair.write(root / family, family) for family in FACTORS["family"]}


def speculative(checkpoint, drafter, k, **settings):
    target, draft = checkpoint
    return LLM(
        str(target),
        mode="sd",
        draft="ngram" if drafter == "ngram" else str(draft),
        k=str(k),
        context=320,
        compile_cache="off",
        **settings,
    )


def test_the_cases_cover_every_pair_of_factors():
    names = list(FACTORS)
    for one, other in itertools.combinations(range(len(names)), 2):
        missing = set(itertools.product(FACTORS[names[one]], FACTORS[names[other]])) - {
            (case[one], case[other]) for case in CASES
        }
        assert not missing, (names[one], names[other])


@pytest.mark.parametrize(
    ("family", "dtype", "drafter", "verify", "k"),
    [pytest.param(*case, marks=MARKS.get(n, pytest.mark.slow)) for n, case in enumerate(CASES)],
)
def test_text_and_logprobs_equal_autoregressive_decoding(
    checkpoints, family, dtype, drafter, verify, k
):
    llm = speculative(
        checkpoints[family],
        drafter,
        k,
        dtype=dtype,
        verify=verify,
        exact="bitwise",
        slots=3,
    )
    assert llm.loaded.exact == "bitwise"
    asked = requests(llm, verify, logprobs=2)
    alone = outputs(llm, asked, "ar")
    spoken = outputs(llm, asked, "sd")
    for one, other in zip(alone, spoken, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == other.logprobs
    rounds = np.sum(
        [np.pad(out.metrics["acceptance_histogram"] or [0], (0, 9))[:9] for out in spoken], 0
    )
    if drafter == "model":  # both ways out of a round were taken
        assert rounds[1:].sum() > 0
        assert rounds[:k].sum() > 0


@pytest.mark.parametrize("flawed", [False, True])
def test_a_draft_that_is_the_target_is_accepted_always_under_block_and_not_without_its_q(
    checkpoints, monkeypatch, flawed
):
    if flawed:
        silent = dataclasses.replace(RULES["block"], ships_q=False)
        for module in (draft_programs, load):
            monkeypatch.setattr(module, "RULES", {**RULES, "block": silent})
    target, _ = checkpoints["qwen3"]
    llm = speculative((target, target), "model", 3, dtype="float32", verify="block", slots=1)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, top_k=40, seed=3)
    (output,) = outputs(llm, [llm.request("0101010101", params)], "sd")
    accepted, judged = np.array(output.metrics["acceptance_by_position"]).T
    assert (accepted == judged).all() != flawed


def refused(message, checkpoint, draft="ngram", **settings):
    with pytest.raises(InputError, match=message):
        LLM(str(checkpoint[0]), mode="sd", draft=str(draft), load=False, **settings)


def test_a_k_that_does_not_fit_the_context_is_refused_before_weights_load(checkpoints):
    refused("k = 8 does not fit a context of 9", checkpoints["llama"], k="8", context=9)
    LLM(str(checkpoints["llama"][0]), mode="sd", draft="ngram", k="7", context=9, load=False)


def test_a_draft_with_another_vocabulary_is_refused_with_the_first_difference(
    checkpoints, tmp_path
):
    draft = tiny.write_checkpoint(tmp_path / "other")
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace("<pad>", "<fill>"))
    refused(
        "id 258 is '<pad>' in the target and '<fill>' in the draft", checkpoints["llama"], draft
    )


def test_a_draft_made_for_fewer_positions_limits_the_context(checkpoints, tmp_path):
    draft = tiny.write_checkpoint(tmp_path / "short", max_position_embeddings=128)
    refused(
        "context = 200 is more than the 128 positions", checkpoints["llama"], draft, context=200
    )
    target = str(checkpoints["llama"][0])
    assert LLM(target, mode="sd", draft=str(draft), load=False).context == 128


@pytest.mark.more
@pytest.mark.parametrize("support", ["1000", "full"])
def test_a_support_is_no_larger_than_the_smaller_vocabulary(checkpoints, tmp_path, support):
    """The draft embeds fewer padding rows than the target."""
    draft = tiny.write_checkpoint(tmp_path / "narrow", vocab_size=tiny.TOKENS)
    llm = LLM(
        str(checkpoints["llama"][0]),
        mode="sd",
        draft=str(draft),
        k="2",
        context=128,
        dtype="float32",
        proposal_support=support,
        compile_cache="off",
    )
    params = SamplingParams(max_tokens=8, temperature=0.8, ignore_eos=True)
    assert len(llm.generate("abc", params)[0].token_ids) == 8
