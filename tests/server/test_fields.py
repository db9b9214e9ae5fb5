"""Fields of requests: what is taken, and how each refusal names its field."""

import pytest

from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.chat import chat_params
from ssd_jax.server.completions import completion_params, completion_prompts
from ssd_jax.server.errors import ApiError
from ssd_jax.server.fields import CHAT, COMPLETION

MESSAGES = [{"role": "user", "content": "hi"}]
DEFAULTS = SamplingParams(max_tokens=None, seed=None, temperature=1.0)


def chat(**fields):
    return chat_params(CHAT.read({"model": "m", "messages": MESSAGES, **fields}), DEFAULTS)


def completion(**fields):
    body = {"model": "m", "prompt": "a", **fields}
    return completion_params(COMPLETION.read(body), DEFAULTS)


@pytest.mark.parametrize("read", [chat, completion])
def test_every_sampling_field_of_openai_and_vllm_reaches_the_parameters(read):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "seed": 5,
        "n": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [4],
        "bad_words": ["x"],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    params = read(**fields, stop="end", logit_bias={"3": 2, "4": -1.5})
    assert {name: getattr(params, name) for name in fields} == {
        **fields,
        "stop_token_ids": (4,),
        "bad_words": ("x",),
    }
    assert (params.stop, params.logit_bias) == (("end",), ((3, 2.0), (4, -1.5)))


def test_defaults_are_openais():
    assert (chat().temperature, chat().max_tokens, chat().seed) == (1.0, None, None)
    assert completion().max_tokens == 16


@pytest.mark.parametrize("read", [chat, completion])
def test_response_formats_are_grammars(read):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    described = {"name": "thing", "strict": True, "schema": schema}
    for given, grammar in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": described}, {"json": schema}),
    ]:
        expected = SamplingParams(structured_outputs=grammar).structured_outputs
        assert read(response_format=given).structured_outputs == expected
    expected = SamplingParams(structured_outputs={"grammar": 'start: "a"'}).structured_outputs
    assert read(grammar='start: "a"').structured_outputs == expected
    fields = {"choice": ["a", "b"]}
    expected = SamplingParams(structured_outputs=fields).structured_outputs
    assert read(structured_outputs=fields).structured_outputs == expected


def test_null_is_as_a_field_that_is_not_given():
    assert chat(temperature=None, stop=None, tools=None, max_completion_tokens=None) == chat()


def test_max_completion_tokens_is_the_limit_of_a_chat():
    assert chat(max_completion_tokens=5).max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).max_tokens == 5
    with pytest.raises(ApiError, match="two names of one limit"):
        chat(max_completion_tokens=5, max_tokens=6)


def test_a_negative_seed_is_one_of_64_bits():
    assert chat(seed=-1).seed == 2**64 - 1
    assert chat(seed=-(2**63)).seed == 2**63


def test_logprobs_of_a_chat_are_on_or_off_and_those_of_a_completion_a_number():
    assert chat(logprobs=False).logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert completion(logprobs=2).logprobs == 2
    assert completion(logprobs=2).prompt_logprobs is None
    assert completion(logprobs=2, echo=True).prompt_logprobs == 2


def test_an_echo_without_new_tokens_is_taken():
    assert completion(echo=True, max_tokens=0).max_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], [[]]),
    ],
)
def test_prompts_are_texts_or_ids_one_or_several(prompt, prompts):
    assert completion_prompts(COMPLETION.read({"model": "m", "prompt": prompt})) == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"store": False},
        {"service_tier": "auto"},
        {"user": "someone"},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(fields):
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("read", "fields", "param", "code"),
    [
        (chat, {"tools": {}}, "tools", "invalid_type"),
        (chat, {"tool_choice": 5}, "tool_choice", "invalid_type"),
        (chat, {"functions": [{}]}, "functions", "unsupported_parameter"),
        (chat, {"response_format": {"type": "grammar"}}, "response_format", "invalid_value"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        (
            chat,
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
            "invalid_value",
        ),
        (
            completion,
            {"grammar": 'start: "a"', "structured_outputs": {"regex": "a"}},
            "grammar",
            "invalid_value",
        ),
        (completion, {"grammar": {"regex": "a"}}, "grammar", "invalid_type"),
        (
            completion,
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "invalid_value",
        ),
        (chat, {"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        (chat, {"store": True}, "store", "unsupported_parameter"),
        (completion, {"best_of": 2}, "best_of", "unsupported_parameter"),
        (completion, {"suffix": "x"}, "suffix", "unsupported_parameter"),
        (chat, {"echo": True}, "echo", "unknown_parameter"),
        (chat, {"temprature": 1}, "temprature", "unknown_parameter"),
        (chat, {"chat_template": "rag"}, "chat_template", "unknown_parameter"),
        (chat, {"temprature": None}, "temprature", "unknown_parameter"),
        (chat, {"messages": "hi"}, "messages", "invalid_type"),
        (chat, {"seed": "5"}, "seed", "invalid_type"),
        (chat, {"n": True}, "n", "invalid_type"),
        (chat, {"n": 1.5}, "n", "invalid_type"),
        (chat, {"stop": [1]}, "stop", "invalid_type"),
        (completion, {"prompt": [1, "a"]}, "prompt", "invalid_type"),
        (completion, {"prompt": {}}, "prompt", "invalid_type"),
        (chat, {"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            chat,
            {"stream": True, "stream_options": {"other": 1}},
            "stream_options.other",
            "unknown_parameter",
        ),
        (
            chat,
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        ),
        (chat, {"temperature": -1}, "temperature", "invalid_value"),
        (chat, {"top_p": 2}, "top_p", "invalid_value"),
        (chat, {"n": 0}, "n", "invalid_value"),
        (chat, {"seed": 2**64}, "seed", "invalid_value"),
        (chat, {"seed": -(2**63) - 1}, "seed", "invalid_value"),
        (chat, {"max_tokens": 0}, "max_tokens", "invalid_value"),
        (chat, {"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        (completion, {"max_tokens": 0}, "max_tokens", "invalid_value"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (completion, {"logprobs": 21}, "logprobs", "invalid_value"),
        (completion, {"logprobs": 21, "echo": True}, "logprobs", "invalid_value"),
        (chat, {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        (chat, {"stop": ""}, "stop", "invalid_value"),
        (chat, {"speculation": "on"}, "speculation", "invalid_type"),
    ],
)
def test_a_refused_field_is_named(read, fields, param, code):
    with pytest.raises(ApiError) as refused:
        read(**fields)
    error = refused.value
    assert (error.status, error.param) == (400, param)
    assert code is None or error.code == code
    assert param.partition(".")[0] in error.message


@pytest.mark.parametrize(("form", "field"), [(CHAT, "messages"), (COMPLETION, "prompt")])
def test_what_is_missing_is_named(form, field):
    with pytest.raises(ApiError) as refused:
        form.read({"model": "m"})
    assert (refused.value.param, refused.value.code) == (field, "missing_required_parameter")


def test_unknown_fields_get_a_hint():
    with pytest.raises(ApiError, match="did you mean 'temperature'"):
        chat(temprature=1)
