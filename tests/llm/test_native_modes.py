"""Greedy text of a GGUF file's own weights is the same in every mode."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd_jax import LLM, SamplingParams
from ssd_jax.testing import tiny as tiny_hf
from tests.checkpoints import gptq, tiny_gguf, tiny_gpt_oss
from tests.checkpoints import tiny_models as tiny

TYPES = {
    **{"q_proj": "Q4_1", "k_proj": "Q5_0", "v_proj": "Q8_0", "o_proj": "Q4_0"},
    **{"gate_proj": "Q5_1", "up_proj": "Q8_0", "down_proj": "Q4_1", "lm_head": "Q8_0"},
}


@pytest.mark.more
@pytest.mark.parametrize("trees", [{}, {"tree_nodes": 5}], ids=["chains", "trees"])
def test_native_text_is_the_same_in_every_mode(tmp_path, trees):
    tensors = tiny.hf_tensors("llama")
    types = {name: TYPES.get(name.split(".")[-2], "F32") for name in tensors}
    tokens = ["a", "b", "ab", *tiny_gguf.TOKENIZER["tokenizer.ggml.tokens"][3:]]
    tokenizer = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    keys = tiny_gguf.metadata("llama") | tokenizer
    path = str(tiny_gguf.write(tmp_path / "m.gguf", "llama", tensors, types=types, keys=keys))
    llm = LLM(
        path, dtype="native", mode="ssd", draft=path, draft_dtype="int8", draft_placement="inline",
        k="2", budget="6", slots=2, context=64, compile_cache="off", **trees,
    )  # fmt: skip
    assert_texts_are_the_same(llm)


@pytest.mark.more
def test_so_is_that_of_experts(tmp_path):
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    path = tiny_hf.write_checkpoint(tmp_path / "m", "qwen3_moe", norm_topk_prob=True, **sizes)
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if ".experts." in name]:
        for expert, matrix in enumerate(stored.pop(name)):
            part = name.replace(".experts.", f".experts.{expert}.")
            stored[part] = np.ascontiguousarray(matrix)
    save_file(stored, path / "model.safetensors")
    gptq.quantise(path)
    llm = LLM(
        path, dtype="auto", mode="ssd", draft=path, draft_dtype="w8a8", draft_placement="inline",
        k="2", budget="6", slots=2, context=64, compile_cache="off",
    )  # fmt: skip
    assert llm.resolved.dtype == "native"
    assert_texts_are_the_same(llm)


@pytest.mark.more
@pytest.mark.parametrize("trees", [{}, {"tree_nodes": 5}], ids=["chains", "trees"])
def test_so_is_that_of_experts_in_mxfp4_with_windows_and_sinks(tmp_path, trees):
    quantised, _ = tiny_gpt_oss.published()
    path = tiny_gpt_oss.write(tmp_path / "m", quantised, quantization_config=tiny_gpt_oss.METHOD)
    llm = LLM(
        path, dtype="native", mode="ssd", draft=path, draft_dtype="bfloat16",
        draft_placement="inline", k="2", budget="6", slots=2, context=64, compile_cache="off",
        **trees,
    )  # fmt: skip
    assert_texts_are_the_same(llm)


def assert_texts_are_the_same(llm):
    prompts = [[4, 5, 6, 7], [30, 20, 10]]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = {mode: llm.generate(prompts, greedy, mode=mode) for mode in llm.modes}
    texts = {mode: [output.token_ids for output in found] for mode, found in outputs.items()}
    assert texts["ar"] == texts["sd"] == texts["ssd"]
    assert len({*texts["ar"][0]}) > 3
    assert all(output.metrics["acceptance_length"] > 1 for output in outputs["ssd"])
