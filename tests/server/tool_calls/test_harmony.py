"""Answers in harmony's channels: reasoning, content and calls, whole and streamed."""

from __future__ import annotations

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from ssd_jax.checkpoints.chat.harmony import MARKS
from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.server.tool_calls.harmony import HARMONY, HarmonyParser
from ssd_jax.server.tool_calls.protocols import Arguments, CallBegin, Content, Reasoning, Tool
from ssd_jax.server.tool_calls.request import ToolUse
from tests.checkpoints.builders import backend, special
from tests.checkpoints.chat.test_harmony import ANALYSIS, CALL, FINAL
from tests.server.tool_calls.test_grammars import SCHEMA, follows

TEMPLATE = "{{ tools }}{{ messages[0].tool_calls }}<|channel|>final<|message|>"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANSWER = f"{ANALYSIS}Hm. Well.<|end|>{FINAL}Yes."


def joined(deltas):
    """Neighbours of a kind as one."""
    found = []
    for delta in deltas:
        if found and type(found[-1]) is type(delta) and not isinstance(delta, CallBegin):
            found[-1] = type(delta)(found[-1].text + delta.text)
        else:
            found.append(delta)
    return found


def parse(text, *, size=1, **about):
    parser = HarmonyParser(frozenset({"f"}), **{"parallel": True, **about})
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    return joined([d for piece in pieces for d in parser.push(piece)] + parser.finish())


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        (ANSWER, [Reasoning("Hm. Well."), Content("Yes.")]),
        (
            f"{ANALYSIS}Hm.<|end|>{CALL}",
            [Reasoning("Hm."), CallBegin("f"), Arguments('{"x": 1}')],
        ),
        (
            f"<|channel|>commentary<|message|>I look.<|end|>{CALL}",
            [Content("I look."), CallBegin("f"), Arguments('{"x": 1}')],
        ),
        (CALL.replace(".f ", ".g ").removeprefix("<|start|>assistant"), [Reasoning('{"x": 1}')]),
        (
            f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c<|end|>{FINAL}d",
            [Reasoning("a\n\nb"), Content("c\n\nd")],
        ),
        ("plain", [Content("plain")]),
    ],
)
def test_what_is_told_apart(text, deltas, size):
    assert parse(text, size=size) == deltas


def test_without_parallel_calls_what_follows_the_first_is_left_out():
    text = CALL.removeprefix("<|start|>assistant") + CALL
    assert len(parse(text)) == 4
    assert parse(text, parallel=False) == [CallBegin("f"), Arguments('{"x": 1}')]


@pytest.fixture
def engine(engine):
    """An engine whose model writes in channels, some characters at a time."""
    engine.tokenizer.chat_template = TEMPLATE
    engine.tokenizer.added_tokens = {"<|end|>": 7, "<|message|>": 8, "<think>": 9}
    return engine


def script(engine, text):
    engine.pieces = [text[place : place + 3] for place in range(0, len(text), 3)]


def test_the_answer_is_the_final_channel_and_reasoning_apart(completions, engine):
    script(engine, ANSWER)
    (choice,) = completions.create(model="m", messages=MESSAGES).choices
    message = choice.message
    assert (message.content, message.reasoning_content) == ("Yes.", "Hm. Well.")
    assert choice.finish_reason == "stop"
    assert engine.asked[-1].visible_ids == {7, 8}
    deltas = [
        chunk.choices[0].delta
        for chunk in completions.create(model="m", messages=MESSAGES, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == "Hm. Well."


def test_a_call_is_one_with_its_reasoning(completions, engine):
    script(engine, f"{ANALYSIS}Hm.<|end|>{CALL}")
    asked = {"model": "m", "messages": MESSAGES, "tools": [TOOL]}
    (choice,) = completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"x": 1}')
    assert choice.message.content is None
    assert choice.message.reasoning_content == "Hm."
    assert choice.finish_reason == "tool_calls"
    state = ChatCompletionStreamState(input_tools=[TOOL])
    for chunk in completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    (choice,) = state.get_final_completion().choices
    assert choice.message.tool_calls[0].function.arguments == '{"x": 1}'


def test_a_text_that_is_cut_off_in_its_reasoning_has_no_content(completions, engine):
    script(engine, f"{ANALYSIS}Hm.")
    (choice,) = completions.create(model="m", messages=MESSAGES, max_tokens=50).choices
    assert (choice.message.content, choice.message.reasoning_content) == (None, "Hm.")
    assert choice.finish_reason == "length"


def test_a_template_without_channels_leaves_texts_as_they_are(completions, engine):
    engine.tokenizer.chat_template = None
    script(engine, ANSWER)
    (choice,) = completions.create(model="m", messages=MESSAGES).choices
    assert choice.message.content == ANSWER


def test_required_and_strict_calls_are_held_to_their_schema():
    pytest.importorskip("llguidance")
    made = backend(special("<eos>"), *map(special, MARKS))
    letters = Tokenizer(made, eos_ids=[made.token_to_id("<eos>")], where="tiny")
    tools = [Tool(name="f", parameters=SCHEMA, strict=True)]

    def allowed(text, *, required):
        use = ToolUse(form=HARMONY, tools=tools, required=required, parallel=True)
        return follows(use, letters, text)

    call = CALL.removesuffix("<|call|>")
    first = call.removeprefix("<|start|>assistant")
    for required in (False, True):
        assert allowed(first, required=required)
        assert allowed(f"{ANALYSIS}Hm.<|end|>{call}", required=required)
        assert not allowed(first.replace("1", "true"), required=required)
        assert not allowed(first.replace(".f ", ".g "), required=required)
        assert allowed(ANSWER, required=required) is not required
        assert not allowed(ANSWER + "<|end|>", required=required)
