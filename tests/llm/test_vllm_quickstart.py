"""Snippets of vLLM's documentation run as they stand, but for the names of package and model.

They are those on offline inference, chat, sampling, and speculative decoding:
https://docs.vllm.ai/en/latest/getting_started/quickstart.html,
.../examples/offline_inference/basic.html, .../features/spec_decode.html.
"""

from __future__ import annotations

import pytest

from ssd_jax import InputError

OFFLINE = """
prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="facebook/opt-125m")
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""

CHAT = """
llm = LLM(model="facebook/opt-125m")
sampling_params = llm.get_default_sampling_params()
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Write an essay about the importance of higher education."},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
conversations = [conversation for _ in range(3)]
outputs += llm.chat(conversations, sampling_params, use_tqdm=False)
"""

SEEDED = """
sampling_params = SamplingParams(
    n=2, temperature=0.7, top_p=0.9, top_k=-1, min_p=0.05, seed=42, max_tokens=8,
    presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1,
    stop=["\\n\\n"], include_stop_str_in_output=True, skip_special_tokens=False, logprobs=2,
)
llm = LLM(model="facebook/opt-125m", seed=0, dtype="auto", trust_remote_code=False)
outputs = llm.generate([{"prompt": "The future of AI is"}], sampling_params)
assert [len(output.outputs) for output in outputs] == [2]
assert all(len(text.logprobs) == len(text.token_ids) for text in outputs[0].outputs)
"""

DRAFT_MODEL = """
prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

llm = LLM(
    model="facebook/opt-125m",
    tensor_parallel_size=1,
    speculative_config={
        "model": "facebook/opt-125m",
        "num_speculative_tokens": 5,
    },
)
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""

NGRAM = """
llm = LLM(
    model="facebook/opt-125m",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)
"""


def ran(snippet: str, checkpoint) -> dict:
    """Variables of a snippet behind its last line."""
    names: dict = {}
    exec(
        "from vllm import LLM, SamplingParams\n".replace("vllm", "ssd_jax")
        + snippet.replace("facebook/opt-125m", str(checkpoint)),
        names,
    )
    return names


@pytest.mark.parametrize(
    ("snippet", "texts"),
    [(OFFLINE, 4), (CHAT, 4), (SEEDED, 1), (DRAFT_MODEL, 1)],
    ids=["offline", "chat", "sampling", "draft model"],
)
def test_snippets_of_vllm_run(snippet, texts, tiny_checkpoint):
    outputs = ran(snippet, tiny_checkpoint)["outputs"]
    assert len(outputs) == texts
    assert all(output.finished and output.outputs[0].token_ids for output in outputs)


def test_snippets_of_vllm_that_cannot_run_get_one_line_with_a_remedy(tiny_checkpoint):
    with pytest.raises(InputError, match="prompt_lookup_max"):
        ran(NGRAM, tiny_checkpoint)
    assert ran(NGRAM.replace('"prompt_lookup_max": 4,', ""), tiny_checkpoint)["llm"].mode == "sd"


def test_assigning_to_parameters_says_what_to_write(tiny_checkpoint):
    snippet = "params = SamplingParams()\nparams.max_tokens = 8\n"
    with pytest.raises(InputError, match=r"dataclasses\.replace\(.*max_tokens=8\)"):
        ran(snippet, tiny_checkpoint)
