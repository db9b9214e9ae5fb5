from __future__ import annotations

import datetime
import json
import sys

import pytest

from ssd_jax.checkpoints.chat.template import ChatTemplate
from ssd_jax.errors import InputError

USER = {"role": "user", "content": "Grüße <b>"}


def render(source, messages=(USER,), *, special_tokens=None, **message_fields):
    template = ChatTemplate(source, special_tokens=special_tokens or {}, where="the model")
    return template.render(list(messages), **{"add_generation_prompt": False, **message_fields})


def test_messages_and_special_tokens_are_given():
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{% endfor %}"
    assert render(source, special_tokens={"bos_token": "<s>"}) == "<s>[user] Grüße <b>"


@pytest.mark.parametrize(("add", "expected"), [(True, "assistant:"), (False, "")])
def test_the_generation_prompt_is_added_where_asked(add, expected):
    source = "{% if add_generation_prompt %}assistant:{% endif %}"
    assert render(source, add_generation_prompt=add) == expected


def test_block_lines_leave_no_white_space():
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


def test_tools_and_documents_are_none():
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_tojson_keeps_characters_as_they_are():
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Grüße <b>"}'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": [\n  2\n ],\n "b": 1\n}'
    )


def test_templates_have_break_and_continue():
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"  # noqa: E501
    assert render(source) == "02"


def test_templates_have_strftime_now():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_generation_blocks_are_kept():
    source = "{% for m in messages %}{% generation %}<{{ m.role }}>{% endgeneration %}{% endfor %}"
    assert render(source) == "<user>"


def test_raise_exception_becomes_an_input_error():
    with pytest.raises(InputError, match="the model failed: roles must alternate;"):
        render("{{ raise_exception('roles must alternate') }}")


def test_an_undefined_role_becomes_an_input_error():
    source = "{% if messages[0].role == 'user' %}u{% else %}{{ missing.text }}{% endif %}"
    assert render(source) == "u"
    with pytest.raises(InputError, match="'missing' is undefined"):
        render(source, [{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("role", "hint"), [("wizard", "use system, developer, user"), ("User", "did you mean 'user'")]
)
def test_a_role_that_nobody_knows_is_refused(role, hint):
    with pytest.raises(InputError, match=rf"messages\[0\]: the role '{role}' is unknown; {hint}"):
        render("{{ messages[0].role }}", [{"role": role, "content": "x"}])


def test_a_role_that_the_template_names_is_known():
    source = "{% if messages[0].role == 'wizard' %}w{% endif %}"
    assert render(source, [{"role": "wizard", "content": "x"}]) == "w"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{% nothing %}"])
def test_a_wrong_template_becomes_an_input_error(source):
    with pytest.raises(InputError, match="chat template of the model failed"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__.__mro__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(InputError, match=r"failed: .*(unsafe|not safely callable)"):
        render(source)


def test_messages_are_left_as_they_are():
    messages = [dict(USER)]
    render("{% set m = messages[0] %}{{ m.role }}", messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (USER, "non-empty list"),
        (None, "non-empty list"),
        (["hello"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\]: 'role' must be a string; it is missing"),
        ([{"role": "user"}], r"messages\[0\]: 'content' must be a string, or .*; it is missing"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]: 'role' must be a string; it is 1"),
        ([{"role": "user", "content": None}], "'content' must be a string, or .*; it is None"),
        ([{"role": "user", "content": ["x" * 99]}], r"content\[0\] must be .* not 'x+\.\.\.x+'$"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"messages\[0\]: content\[0\] is of type 'image_url'; only parts of type 'text'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "'text' must be a string; it is None"),
        ([{**USER, "tool_calls": "x"}], "'tool_calls' must be a list of objects, not 'x'"),
        (
            [{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            r"tool_calls\[0\]: 'arguments' must be an object or .* of one; it is '\[1\]'",
        ),
    ],
)
def test_malformed_messages_are_named(messages, message):
    template = ChatTemplate("x", special_tokens={}, where="the model")
    with pytest.raises(InputError, match=message):
        template.render(messages, add_generation_prompt=True)


def test_openais_form_of_messages_becomes_the_one_that_templates_know():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    messages = [{"role": "user", "content": parts, "name": "Ann"}, answer]
    assert json.loads(render("{{ messages | tojson }}", messages)) == [
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
        },
    ]
    assert answer["content"] is None
    answer = {"role": "assistant", "content": "c", "tool_calls": []}
    assert render("{{ 'tool_calls' in messages[0] }}", [answer]) == "False"


def test_tools_and_variables_reach_a_template_that_names_them():
    source = "{{ tools[0].name }} {{ enable_thinking }}"
    assert render(source, tools=[{"name": "f"}], variables={"enable_thinking": False}) == "f False"


@pytest.mark.parametrize(
    ("message_fields", "message"),
    [
        ({"tools": [{"name": "f"}]}, "the chat template of the model takes no 'tools'"),
        ({"tools": [print]}, "tools must be a list of objects"),
        ({"variables": {"thinking": True}}, "the chat template of the model takes no 'thinking'"),
    ],
)
def test_messages_that_a_template_would_leave_out_are_refused(message_fields, message):
    with pytest.raises(InputError, match=message):
        render("{{ messages[0].content }}", **message_fields)


TURNS = "{% for m in messages %}[{{ m.content MORE }}]{% endfor %}"


@pytest.mark.parametrize(
    ("more", "content", "expected"),
    [
        ("", "so far ", "[Grüße <b>][so far "),
        ("| trim", "so far ", "[Grüße <b>][so far"),
        ("| trim", "so far", "[Grüße <b>][so far"),
        ("", "", "[Grüße <b>]["),
    ],
)
def test_the_last_message_can_be_continued(more, content, expected):
    messages = [USER, {"role": "assistant", "content": content}]
    source = TURNS.replace("MORE", more)
    assert render(source, messages, continue_final_message=True) == expected
    assert messages[-1]["content"] == content


def test_a_message_that_the_template_leaves_out_cannot_be_continued():
    with pytest.raises(InputError, match="leaves out the last message, so it cannot be continued"):
        render("{{ messages[0].content }}", [USER, USER], continue_final_message=True)


def test_a_message_is_continued_or_another_begun():
    with pytest.raises(InputError, match="leave out one"):
        render("x", continue_final_message=True, add_generation_prompt=True)


def test_the_process_needs_no_place_of_the_program(tmp_path, monkeypatch):
    """As of an editable installation, run in a directory with files of any name."""
    (tmp_path / "re.py").write_text("raise SystemExit('not this one')")
    hook = "__editable__.finder.__path_hook__"
    monkeypatch.setattr(sys, "path", [str(tmp_path), hook, *sys.path])
    monkeypatch.chdir(tmp_path)
    assert render("{{ 1 + 1 }}") == "2"
