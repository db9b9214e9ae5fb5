"""Conversations and prompts in the forms that callers of vLLM and of OpenAI's interface know."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ssd_jax import LLM, InputError, SamplingParams

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]
ANSWERED = [*HI, {"role": "assistant", "content": "so"}]
TOOLS = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return LLM(Path(tiny_checkpoint), dtype="float32", slots=2, context=64, load=False)


def text(llm, prompt) -> str:
    return llm.get_tokenizer().decode(llm.encode(prompt))


def test_a_conversation_or_several_are_answered(llm):
    (one,) = llm.chat(HI, SHORT)
    both = llm.chat([HI, ANSWERED], sampling_params=SHORT)
    assert [output.token_ids for output in both] == [
        one.token_ids,
        llm.generate([ANSWERED], SHORT)[0].token_ids,
    ]


def test_a_last_message_of_the_assistant_is_continued_where_asked(llm, monkeypatch):
    assert text(llm, ANSWERED) == "<eot>user:hi<eot>assistant:so<eot>assistant:"
    asked = {"messages": ANSWERED, "continue_final_message": True}
    assert text(llm, asked) == "<eot>user:hi<eot>assistant:so"
    assert text(llm, {"messages": HI, "add_generation_prompt": False}) == "<eot>user:hi"
    (output,) = llm.chat(ANSWERED, SHORT, continue_final_message=True)
    assert output.token_ids == llm.generate(llm.encode(asked), SHORT)[0].token_ids


def test_objects_stand_for_their_prompts(llm):
    assert llm.encode({"prompt": "hi"}) == llm.encode("hi") == llm.encode({"messages": HI})
    assert llm.encode({"prompt_token_ids": np.array([5, 6])}) == [5, 6]
    prompts = [{"prompt": "hi"}, {"prompt_token_ids": [5, 6]}]
    outputs = llm.generate(prompts, SHORT)
    assert [o.token_ids for o in outputs] == [
        o.token_ids for o in llm.generate(["hi", [5, 6]], SHORT)
    ]
    assert llm.generate(prompts[0], SHORT)[0].token_ids == outputs[0].token_ids


def test_tools_and_a_template_reach_the_prompt(llm):
    prompt = {"messages": HI, "tools": [{"name": "f"}], "chat_template": TOOLS}
    assert text(llm, prompt) == '[{"name": "f"}]hi'
    thinking = {"messages": HI, "chat_template": "{{ x }}", "chat_template_kwargs": {"x": 1}}
    assert text(llm, thinking) == "1"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "a", "messages": HI}, "a prompt has one of .*; it has"),
        ({"prompts": "a"}, "prompt: unknown key 'prompts'; did you mean 'prompt'"),
        ({"tools": []}, "a prompt has one of prompt, prompt_token_ids, messages; it has"),
        ({"prompt": 5}, "prompt must be a string; it is 5"),
        ({"prompt": "a", "tools": []}, "tools is for messages, not for prompt"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of integers; it is 'a'"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids must be a list of integers"),
        ({"messages": "a"}, "messages must be a list of messages; it is 'a'"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": HI, "tools": [{"name": "f"}]}, "takes no 'tools'"),
        ({"messages": HI, "chat_template": 5}, "chat_template = 5 is not understood; give text"),
        (
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "leave out one",
        ),
        ({"messages": HI, "chat_template_kwargs": {"tools": 1}}, "give tools as an argument"),
        ([{"role": "wizard", "content": "a"}], "the role 'wizard' is unknown"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type 'image_url'; only"),
    ],
)
def test_a_malformed_prompt_is_named(llm, prompt, message):
    with pytest.raises(InputError, match=message):
        llm.encode(prompt)


def test_a_progress_bar_is_refused_and_none_is_taken(llm):
    (output,) = llm.chat(HI, SHORT, use_tqdm=False)
    assert output.token_ids == llm.chat(HI, SHORT)[0].token_ids
    with pytest.raises(InputError, match="use_tqdm = True: there is no progress bar"):
        llm.chat(HI, SHORT, use_tqdm=True)
    assert llm.generate(["hi"], SHORT, use_tqdm=False)[0].text


@pytest.mark.parametrize("name", ["lora_request", "mm_processor_kwargs"])
def test_settings_without_meaning_for_chat_are_refused_by_name(llm, name):
    with pytest.raises(InputError, match=f"unknown key '{name}'"):
        llm.chat(HI, SHORT, **{name: True})


def test_the_tokenizer_is_one_that_callers_of_transformers_know(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("hi<eos>")
    assert ids[-1] == tokenizer.eos_token_id == 256
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.bos_token_id) == (
        "<eos>",
        None,
        None,
    )
    assert tokenizer.decode(ids) == "hi<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi"
    assert tokenizer.decode(ids[0]) == "h"
    assert len(tokenizer) == 259
    assert tokenizer.apply_chat_template(HI, tokenize=False) == "<eot>user:hi"
    asked = tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
    assert asked == llm.encode(HI)
    with pytest.raises(InputError, match="makes a list of ids; leave out return_tensors"):
        tokenizer.apply_chat_template(HI, return_tensors="pt")


def test_spelled_control_tokens_are_text_where_they_are_plain(tiny_checkpoint, llm):
    spelled = [{"role": "user", "content": "a<eot>b"}]
    plain = LLM(
        Path(tiny_checkpoint), dtype="float32", context=64, load=False, control_tokens="plain"
    )
    assert llm.encode(spelled).count(257) == 3
    for prompt in (spelled, "a<eot>b"):
        ids = plain.encode(prompt)
        assert ids.count(257) == 2
        assert text(plain, prompt) == text(llm, prompt) == "<eot>user:a<eot>b<eot>assistant:"
    without = LLM(
        Path(tiny_checkpoint),
        dtype="float32",
        context=64,
        load=False,
        control_tokens="plain",
        chat_template=False,
    )
    assert 257 not in without.encode("a<eot>b")
