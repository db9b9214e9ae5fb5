"""Calls in responses, as the `openai` client and its helpers read them, streamed and not."""

from __future__ import annotations

import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.server.http_calls import stream
from tests.server.tool_calls import templates

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEXT = f"Let me see.\n{CALL}\n{CALL}"


@pytest.fixture
def engine(engine):
    """An engine whose model writes calls of Hermes' form, some characters at a time."""
    engine.tokenizer.chat_template = templates.HERMES
    engine.pieces = [TEXT[place : place + 3] for place in range(0, len(TEXT), 3)]
    return engine


def shown(choice):
    """What a choice says, without the ids of its calls."""
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id.startswith("call_") and call.type == "function" for call in calls)
    functions = [(call.function.name, call.function.arguments) for call in calls]
    return choice.message.content, functions, choice.finish_reason


CALLED = ("Let me see.", [("f", '{"x": 1}')] * 2, "tool_calls")


def test_calls_are_apart_from_the_content(completions):
    answer = completions.create(model="m", messages=MESSAGES, tools=[TOOL], n=2)
    assert [shown(choice) for choice in answer.choices] == [CALLED, CALLED]


def test_the_content_of_a_text_of_calls_alone_is_null(completions, engine):
    engine.pieces = [CALL]
    (choice,) = completions.create(model="m", messages=MESSAGES, tools=[TOOL]).choices
    assert shown(choice) == (None, [("f", '{"x": 1}')], "tool_calls")


def test_a_stream_accumulates_to_the_same(completions):
    state = ChatCompletionStreamState(input_tools=[TOOL])
    names, arguments = [], []
    for chunk in completions.create(model="m", messages=MESSAGES, tools=[TOOL], stream=True, n=2):
        state.handle_chunk(chunk)
        for call in chunk.choices[0].delta.tool_calls or []:
            names += [call.function.name] if call.id else []
            arguments += [call.function.arguments] if not call.id else []
    answer = state.get_final_completion()
    assert [shown(choice) for choice in answer.choices] == [CALLED, CALLED]
    assert names == ["f"] * 4
    assert len(arguments) > 8


def test_the_clients_own_helper_takes_a_stream(completions):
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with completions.stream(model="m", messages=MESSAGES, tools=[strict]) as events:
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        answer = events.get_final_completion()
    assert [(e.name, e.arguments) for e in done] == CALLED[1]
    assert shown(answer.choices[0]) == CALLED


def test_the_clients_own_helper_parses_arguments(completions):
    class F(pydantic.BaseModel):
        x: int

    described = openai.pydantic_function_tool(F, name="f")
    answer = completions.parse(model="m", messages=MESSAGES, tools=[described])
    calls = answer.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls] == [F(x=1)] * 2


def test_answers_and_results_are_messages_of_the_next_turn(completions, engine):
    message = completions.create(model="m", messages=MESSAGES, tools=[TOOL]).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls
    ]
    engine.pieces = ["So 5."]
    (choice,) = completions.create(
        model="m", messages=[*MESSAGES, message, *results], tools=[TOOL]
    ).choices
    assert shown(choice) == ("So 5.", [], "stop")


def test_a_call_that_is_cut_off_says_so(completions, engine):
    engine.pieces = [*CALL]
    cut = CALL.index("1") + 1
    arguments = {"model": "m", "messages": MESSAGES, "tools": [TOOL], "max_tokens": cut}
    (choice,) = completions.create(**arguments).choices
    assert shown(choice) == (None, [("f", '{"x": 1')], "length")
    *_, last = completions.create(**arguments, stream=True)
    assert last.choices[0].finish_reason == "length"


def test_where_no_tool_may_be_called_texts_stay_as_they_are(completions):
    (choice,) = completions.create(
        model="m", messages=MESSAGES, tools=[TOOL], tool_choice="none"
    ).choices
    assert shown(choice) == (TEXT, [], "stop")


def test_token_ids_come_once_though_their_text_is_held_back(server, engine):
    fields = {"model": "m", "messages": MESSAGES, "tools": [TOOL], "return_token_ids": True}
    chunks = stream(server.port, "/v1/chat/completions", fields)
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert len(ids) == len(engine.pieces)


def test_of_several_templates_that_of_tools_says_how_calls_are_written(completions, engine):
    engine.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": templates.HERMES}
    choice = completions.create(model="m", messages=MESSAGES, tools=[TOOL]).choices[0]
    assert len(choice.message.tool_calls) == 2


def test_tools_without_a_template_for_them_are_refused_by_name(completions, engine):
    engine.tokenizer.chat_template = None
    with pytest.raises(openai.BadRequestError, match="takes no tools") as refused:
        completions.create(model="m", messages=MESSAGES, tools=[TOOL])
    assert refused.value.param == "tools"
