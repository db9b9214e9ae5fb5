"""What requests say of tools: what is taken, and how each refusal names its field."""

from __future__ import annotations

import pytest

from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.chat import chat_params, chat_prompt
from ssd_jax.server.errors import ApiError
from ssd_jax.server.fields import CHAT
from ssd_jax.server.tool_calls.forms import form_named, form_of
from ssd_jax.server.tool_calls.hermes import HERMES
from ssd_jax.server.tool_calls.llama3_json import LLAMA3_JSON
from ssd_jax.server.tool_calls.messages import check_messages
from ssd_jax.server.tool_calls.request import read_tool_use
from tests.server.scripted import Letters
from tests.server.tool_calls import templates

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
NAMED = {"type": "function", "function": {"name": "f"}}


def tool(name="f", **fields):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


def fields_of(**fields):
    return CHAT.read({"model": "m", "messages": [USER], **fields})


def use(template=templates.HERMES, form=None, **fields):
    return read_tool_use(fields_of(**fields), form, template)


def test_the_form_of_calls_is_that_of_the_template():
    assert form_of(templates.HERMES) is HERMES
    assert form_of(templates.LLAMA) is LLAMA3_JSON
    assert form_of(templates.QWEN3_CODER) is None
    assert form_of("{{ tools }}") is None


@pytest.mark.parametrize(
    ("published", "form"),
    [
        (
            r"""{{- "within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": """
            r"""<function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}""",
            HERMES,
        ),
        (
            r"""{{- 'Respond in the format {"name": function name, "parameters": dictionary of """
            r"""argument name and its value}.' }}{{- "<|python_tag|>" }}""",
            LLAMA3_JSON,
        ),
        ("""{{- '<tool_call>' + name }}<arg_key>{{ k }}</arg_key>{{ tc.arguments }}""", None),
        ("""[TOOL_CALLS] [{"name": "{{ name }}", "arguments": {{ arguments }}}]""", None),
    ],
    ids=["qwen", "llama", "glm", "mistral"],
)
def test_the_words_of_published_templates_are_known(published, form):
    assert form_of(published) is form


def test_a_named_form_is_taken_whatever_the_template_says():
    assert form_named("llama3_json") is LLAMA3_JSON
    assert use(form=LLAMA3_JSON, tools=[tool()]).form is LLAMA3_JSON
    with pytest.raises(
        InputError, match="tool_parser = 'xml' is unknown; give one of openai, hermes, lla"
    ):
        form_named("xml")


def test_without_tools_or_with_none_chosen_there_are_no_calls_and_any_template_will_do():
    for fields in [
        {},
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"tools": [tool()], "tool_choice": "none"},
    ]:
        assert use(template=None, **fields) is None


def test_tools_are_given_to_the_template_unless_none_may_be_called():
    assert chat_prompt(fields_of(tools=[tool()]))["tools"] == [tool()]
    assert "tools" not in chat_prompt(fields_of(tools=[tool()], tool_choice="none"))


def test_a_choice_says_which_tools_and_how_many_calls_there_may_be():
    several = [tool("f"), tool("g")]
    auto = use(tools=several)
    assert ([t.name for t in auto.tools], auto.required, auto.parallel) == (["f", "g"], False, True)
    required = use(tools=several, tool_choice="required", parallel_tool_calls=False)
    assert (required.required, required.parallel) == (True, False)
    named = use(tools=several, tool_choice=NAMED)
    assert ([t.name for t in named.tools], named.required, named.parallel) == (["f"], True, False)


def test_texts_are_held_to_a_grammar_where_calls_are_required_or_a_tool_is_strict():
    assert use(tools=[tool()]).grammar(Letters()) is None
    for fields in [
        {"tools": [tool()], "tool_choice": "required"},
        {"tools": [tool(), tool("g", strict=True)]},
    ]:
        grammar = use(**fields).grammar(Letters())
        params = chat_params(fields_of(**fields), SamplingParams(), grammar)
        assert params.structured_outputs.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [tool(), {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(returns={})]}, "tools[0].function.returns"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool()], "template": None}, "tools"),
        ({"tools": [tool()], "template": "{{ messages }}"}, "tools"),
        ({"tools": [tool()], "template": templates.QWEN3_CODER}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool("g")], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool()], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [tool()], "grammar": 'start: "a"'}, "grammar"),
        ({"tools": [tool()], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ],
)
def test_a_refused_field_is_named(fields, param):
    with pytest.raises(ApiError) as refused:
        use(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param.partition("[")[0] in refused.value.message


def test_a_text_format_goes_with_tools():
    assert use(tools=[tool()], response_format={"type": "text"}) is not None
    fields = {"tools": [tool()], "response_format": {"type": "json_object"}, "tool_choice": "none"}
    assert use(**fields) is None


def test_results_say_of_which_call_and_calls_of_which_function():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    called = {"role": "assistant", "tool_calls": [call]}
    check_messages([USER, called, result], templates.HERMES)
    with pytest.raises(ApiError, match=r"messages\[0\].tool_calls: the chat template"):
        check_messages([called], "{{ messages[0].content }}")
    for message, words in [
        ({"role": "tool", "content": "5"}, r"messages\[1\].tool_call_id"),
        ({"role": "tool", "tool_call_id": 1, "content": "5"}, r"messages\[1\].tool_call_id"),
        ({"role": "assistant", "tool_calls": [call, {}]}, r"messages\[1\].tool_calls\[1\]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, r"tool_calls\[0\]"),
    ]:
        with pytest.raises(ApiError, match=words) as refused:
            check_messages([USER, message], templates.HERMES)
        assert refused.value.param == "messages"
