"""Real checkpoints against stored outputs of `transformers` in float32 on the same weights."""

import dataclasses
import json
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from ssd_jax import LLM, SamplingParams
from ssd_jax.checkpoints.drafts.checkpoint import identity_of
from ssd_jax.tools.bench.prompts import load_prompts

pytestmark = pytest.mark.slow

GOLDENS = Path(__file__).parent / "goldens"


def golden(name):
    return json.loads((GOLDENS / f"{name}.json").read_text())


def first_logits(llm, prompt_ids):
    """The logits after a prompt of at most 128 tokens, through the engine's own program."""
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(prompt_ids)] = prompt_ids
    where = np.array([0, 0, len(prompt_ids)], np.int32)
    prefill = llm.loaded.programs["prefill", 128]
    pages, history = llm.loaded.programs.new_pages(), llm.loaded.programs.new_history()
    _, _, logits, _ = prefill(llm.loaded.parameters, pages, history, None, padded, where)
    return np.asarray(logits, np.float64)[0]


def check(path, name):
    expected = golden(name)
    llm = LLM(str(path), dtype="float32", context=512)
    assert llm.encode(expected["messages"]) == expected["prompt_ids"]
    logits = first_logits(llm, expected["prompt_ids"])
    for token, logit in expected["top5"]:
        assert logits[token] == pytest.approx(logit, abs=0.02)
    top = logits.max()
    assert top + np.log(np.exp(logits - top).sum()) == pytest.approx(
        expected["logsumexp"], abs=0.02
    )
    params = SamplingParams(max_tokens=expected["max_new_tokens"])
    (output,) = llm.generate([expected["messages"]], params)
    assert output.token_ids == expected["greedy_ids"]


def test_smollm2_gives_the_golden_prompt_logits_and_text(smollm2_path):
    check(smollm2_path, "smollm2")


def test_qwen_draft_gives_the_golden_prompt_logits_and_text(qwen_draft_path):
    check(qwen_draft_path, "qwen2.5-coder-0.5b")


def test_qwen_target_gives_the_golden_prompt_logits_and_text(qwen_target_path):
    check(qwen_target_path, "qwen2.5-coder-1.5b")


def test_smollm2_converted_reads_back_bit_for_bit_and_decodes_the_same(smollm2_path, tmp_path):
    from ssd_jax.cli.main import main

    out = tmp_path / "smollm2"
    assert main(["convert", f"--target={smollm2_path}", f"--out={out}", "--dtype=bfloat16"]) == 0
    before = LLM(str(smollm2_path), context=256)
    after = LLM(str(out), context=256)
    for one, other in zip(before.loaded.parameters, after.loaded.parameters, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    tied = {"model.embed_tokens.weight": "model.embed_tokens.weight"}
    sha_before, sha_after = (identity_of(llm.target.checkpoint, tied) for llm in (before, after))
    assert sha_before.sha256 == sha_after.sha256  # a draft made for the one serves the other
    params = SamplingParams(max_tokens=24)
    texts = [llm.generate("Why is the sky blue?", params)[0].text for llm in (before, after)]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20


DRAFTS = {
    "ngram": {"mode": "sd", "draft": "ngram"},
    "int8": {
        "mode": "ssd",
        "draft_placement": "inline",
        "draft_dtype": "int8",
        "budget": "8",
    },
    "light": {"mode": "sd", "draft": "default"},
    "strong": {
        "mode": "ssd",
        "draft": "smollm2-135m-strong",
        "draft_placement": "inline",
        "budget": "8",
    },
}


@pytest.fixture(scope="module", params=["bfloat16", "float32", "native"])
def speculative_dtype(request):
    return request.param


@pytest.fixture(scope="module", params=DRAFTS)
def speculative(request, smollm2_path, speculative_dtype):
    """SmolLM2 with n-grams, its own int8 weights or a draft of the package; one K, so that programs
    are shared."""
    settings = {"draft": str(smollm2_path)} | DRAFTS[request.param]
    return LLM(
        str(smollm2_path),
        dtype=speculative_dtype,
        verify="coupled",
        exact="bitwise",
        k="4",
        slots=3,
        context=1024,
        **settings,
    )


def equal_in_all_modes(llm, prompts, max_tokens):
    """Greedy and coupled texts in every mode that was prepared; returns the outputs by mode."""
    greedy = SamplingParams(max_tokens=max_tokens)
    coupled = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=7)
    requests = [
        llm.request(prompt.content, params, index)
        for params in (greedy, coupled)
        for index, prompt in enumerate(prompts)
    ]
    texts = {}
    for mode in llm.modes:
        how = {"ar": {"k": 0}, "sd": {"branches": False}}.get(mode, {})
        asked = [dataclasses.replace(request, **how) for request in requests]
        ids = {llm.engine.add(request): place for place, request in enumerate(asked)}
        texts[mode] = [None] * len(requests)
        while llm.engine.has_work:
            for event in llm.engine.step():
                if event.output is not None:
                    texts[mode][ids[event.request_id]] = event.output
    assert llm.loaded.exact == "bitwise"
    for alone, *others in zip(*texts.values(), strict=True):
        for spoken in others:
            assert alone.token_ids == spoken.token_ids
            assert alone.finish_reason == spoken.finish_reason
    assert max(len(output.token_ids) for output in texts["ar"]) == max_tokens
    return texts


def check_speculation(llm, sets, max_tokens):
    texts = equal_in_all_modes(llm, load_prompts(sets), max_tokens)
    for mode in llm.modes[1:]:
        lengths = [output.metrics["acceptance_length"] for output in texts[mode]]
        assert all(length >= 1 for length in lengths)
        if llm.config.draft == llm.config.target:  # rounded
            assert min(lengths) > 2
        else:
            assert max(lengths) > 1 if llm.config.draft == "ngram" else median(lengths) > 1.5
    if "ssd" in llm.modes:
        least = 0.5 if llm.config.draft == llm.config.target else 0.1
        assert all(output.metrics["hit_rate"] > least for output in texts["ssd"])


def test_smollm2_says_the_same_in_every_mode(speculative):
    check_speculation(speculative, "humaneval:1,gsm8k:1,mt_bench:1", 48)


def test_smollm2_says_the_same_in_every_mode_at_length(speculative):
    check_speculation(speculative, "humaneval:7,gsm8k:7,mt_bench:6", 128)
