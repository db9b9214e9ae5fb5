"""Llama 3's form: the prompts of its template, what its models write, and the loop of a client."""

from __future__ import annotations

import json

import openai
import pytest

from ssd_jax.checkpoints.chat.template import ChatTemplate
from ssd_jax.errors import InputError
from ssd_jax.server.fields import CHAT
from ssd_jax.server.tool_calls.forms import form_named
from ssd_jax.server.tool_calls.request import read_tool_use
from tests.server.tool_calls import templates
from tests.server.tool_calls.parsing import parse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it warm in São Paulo?"},
]
CALL = '{"name": "get_weather", "parameters": {"city": "São Paulo"}}'


@pytest.fixture(scope="module")
def render():
    template = ChatTemplate(
        templates.LLAMA, special_tokens={"bos_token": "<|begin_of_text|>"}, where="the model"
    )

    def rendered(*messages, **variables):
        variables = {"date_string": "26 Jul 2024", **variables}
        return template.render(
            messages, tools=[TOOL], add_generation_prompt=True, variables=variables
        )

    yield rendered
    template.close()


def turn(role, text=""):
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"


def described():
    words = '{"name": function name, "parameters": dictionary of arguments}.'
    return f"Respond in the format {words}\n{json.dumps(TOOL, indent=4)}\n\n"


SYSTEM = "Environment: ipython\nToday Date: 26 Jul 2024\n\n"
BEGIN = "<|begin_of_text|>"
QUESTION = "Is it warm in São Paulo?<|eot_id|>"


def test_tools_stand_in_the_users_message_or_if_a_request_says_so_in_the_systems(render):
    system, user = turn("system", f"{SYSTEM}Be brief.<|eot_id|>"), turn("user")
    assert render(*MESSAGES) == BEGIN + system + user + described() + QUESTION + turn("assistant")
    system = turn("system", f"{SYSTEM}{described()}Be brief.<|eot_id|>")
    in_system = render(*MESSAGES, tools_in_user_message=False)
    assert in_system == BEGIN + system + user + QUESTION + turn("assistant")


def test_a_call_and_its_result_come_back_as_the_model_wrote_and_saw_them(render):
    function = {"name": "get_weather", "arguments": '{"city": "São Paulo"}'}
    call = {"id": "1", "type": "function", "function": function}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": '31 "C"'}
    *_, text = render(*MESSAGES, called, result).partition(QUESTION)
    assert text == "".join(
        [
            turn("assistant", f"{CALL}<|eot_id|>"),
            turn("ipython", '"31 \\"C\\""<|eot_id|>'),
            turn("assistant"),
        ]
    )
    with pytest.raises(InputError, match="single tool-calls at once"):
        render(*MESSAGES, {**called, "tool_calls": [call, call]})
    plain = {"role": "assistant", "content": "No.", "tool_calls": []}
    assert turn("assistant", "No.<|eot_id|>") in render(*MESSAGES, plain)


TEXTS = [
    (CALL, "", ["São Paulo"]),
    (f"<|python_tag|>{CALL}", "", ["São Paulo"]),
    ('{"type": "function", ' + CALL[1:], "", ["São Paulo"]),
    ('{"name": "get_weather", "parameters": {"city": "S\\u00e3o Paulo"}}', "", ["São Paulo"]),
    ('{"name": "get_weather", "parameters": "{\\"city\\": \\"Rome\\"}"}', "", ["Rome"]),
    ('{"parameters": {"city": "Rome"}, "name": "get_weather"}', "", ["Rome"]),
    ('{\n  "name": "get_weather",\n  "parameters": {\n    "city": "}; {"\n  }\n}\n', "", ["}; {"]),
    (f"{CALL}; {CALL.replace('São Paulo', 'Rome')}", "", ["São Paulo", "Rome"]),
    (f"<|python_tag|>{CALL}; {CALL.replace('São Paulo', 'Rome')}", "", ["São Paulo", "Rome"]),
    (f"{CALL}\n{CALL}", "", ["São Paulo", "São Paulo"]),
    ("It is warm {31 C} there.", "It is warm {31 C} there.", []),
    ('{"temperature": 31}', '{"temperature": 31}', []),
    (CALL.replace("get_weather", "get_time"), CALL.replace("get_weather", "get_time"), []),
    (f"I would call {CALL}", f"I would call {CALL}", []),
    (
        '<|python_tag|>brave_search.call(query="warm?")',
        '<|python_tag|>brave_search.call(query="warm?")',
        [],
    ),
]


@pytest.mark.parametrize(("text", "content", "cities"), TEXTS)
@pytest.mark.parametrize("size", [1, 3, 1000], ids="in pieces of {}".format)
def test_what_its_models_write_is_read(text, content, cities, size):
    parser = form_named("llama3_json").parser(frozenset({"get_weather"}), parallel=True)
    found, calls = parse(parser, text, range(0, len(text), size))
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("get_weather", {"city": city}) for city in cities
    ]


@pytest.mark.parametrize(
    "fields", [{}, {"parallel_tool_calls": True}, {"tool_choice": "required"}], ids=str
)
def test_a_template_of_one_call_a_message_gets_one(fields):
    asked = CHAT.read({"model": "m", "messages": MESSAGES, "tools": [TOOL], **fields})
    assert not read_tool_use(asked, None, templates.LLAMA).parallel
    assert read_tool_use(asked, None, templates.HERMES).parallel


def test_a_clients_loop_ends_with_an_answer(server, engine, render):
    """The message that comes back can be sent: what follows its first call is left out."""
    engine.tokenizer.chat_template = templates.LLAMA
    engine.pieces = [*f"<|python_tag|>{CALL}; {CALL}"]
    arguments = {"model": "m", "messages": MESSAGES, "tools": [TOOL]}
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none") as client:
        create = client.chat.completions.create
        message = create(**arguments).choices[0].message
        (call,) = message.tool_calls
        streamed = [chunk.choices[0].delta for chunk in create(**arguments, stream=True)]
        names = [part.function.name for delta in streamed for part in delta.tool_calls or ()]
        result = {"role": "tool", "tool_call_id": call.id, "content": "31 C"}
        engine.pieces = ["It is."]
        conversation = [*MESSAGES, message, result]
        answer = create(model="m", messages=conversation, tools=[TOOL]).choices[0].message
    assert [name for name in names if name] == ["get_weather"]
    assert (answer.content, answer.tool_calls) == ("It is.", None)
    sent = message.model_dump(exclude_unset=True)
    assert f"{CALL}<|eot_id|>" in render(*MESSAGES, sent, result)
