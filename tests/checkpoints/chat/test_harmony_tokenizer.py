"""A tokenizer like o200k_harmony, and a template with what gpt-oss's is made of."""

from __future__ import annotations

import datetime

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from ssd_jax.checkpoints.chat.harmony import MARKS, mark_ids
from ssd_jax.checkpoints.chat.template import ChatTemplate
from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.errors import InputError
from tests.checkpoints.builders import LETTERS, directory, special

USER = {"role": "user", "content": "Hi"}


HARMONY = """
{%- macro render_tools(namespace, tools) -%}
namespace {{ namespace }} {
    {%- for tool in tools %}type {{ tool.function.name }} = () => any;{% endfor -%}
}
{%- endmacro -%}
{%- macro developer() %}
    {%- if messages[0].role in ["developer", "system"] %}
        {{- "<|start|>developer<|message|># Instructions\\n\\n" + messages[0].content }}
        {%- if tools -%}{{ "\\n\\n# Tools\\n\\n" }}{{ render_tools("functions", tools) }}{%- endif -%}
        {{- "<|end|>" }}
    {%- endif %}
{%- endmacro -%}
{%- set reasoning_effort = reasoning_effort | default("medium") -%}
{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") }}
{{- "\\n\\nReasoning: " + reasoning_effort + "<|end|>" }}
{{- developer() }}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages if message.role not in ["developer", "system"] -%}
    {%- if message.role == "assistant" -%}
        {%- if "tool_calls" in message -%}
            {%- if "thinking" in message %}
                {%- if message.content and message.thinking -%}
                    {{- raise_exception("both content and thinking") }}
                {%- endif -%}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}
                {{- "<|end|>" }}
            {%- endif -%}
            {%- set call = message.tool_calls[0].function -%}
            {%- set last_tool_call.name = call.name -%}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json" }}
            {{- "<|message|>" + call.arguments | tojson + "<|call|>" }}
        {%- elif loop.last and not add_generation_prompt -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else -%}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif -%}
    {%- elif message.role == "tool" -%}
        {%- if last_tool_call.name is none -%}
            {{- raise_exception("a result without a call") }}
        {%- endif -%}
        {{- "<|start|>functions." + last_tool_call.name + " to=assistant<|channel|>commentary" }}
        {{- "<|message|>" + message.content | tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""  # noqa: E501
"""What gpt-oss's template is made of: macros, a namespace, dates, filters of loops, refusals."""


def render(messages, **about):
    template = ChatTemplate(HARMONY, special_tokens={}, where="the model")
    return template.render(messages, **{"add_generation_prompt": False, **about})


def test_templates_in_harmonys_form_are_rendered():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "f?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I call f.",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]
    text = render(
        messages,
        add_generation_prompt=True,
        tools=[{"type": "function", "function": {"name": "f"}}],
        variables={"reasoning_effort": "high"},
    )
    assert text == (
        f"<|start|>system<|message|>Current date: {datetime.date.today()}\n\nReasoning: high<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n"
        "namespace functions {type f = () => any;}<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes?<|end|>"
        "<|start|>user<|message|>f?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I call f.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"5"<|end|>'
        "<|start|>assistant"
    )
    with pytest.raises(InputError, match="a result without a call"):
        render([USER, {"role": "tool", "content": "5"}])
    twice = [USER, {**messages[4], "content": "I see."}]
    with pytest.raises(InputError, match="both content and thinking"):
        render(twice)


_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_END}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


def backend():
    """Bytes, cut into words as o200k does, and the marks."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    split = pre_tokenizers.Split(Regex(O200K), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([special("<|endoftext|>"), *map(special, MARKS)])
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    made = backend()
    ends = [made.token_to_id(token) for token in ("<|return|>", "<|endoftext|>", "<|call|>")]
    path = directory(
        tmp_path,
        made,
        tokenizer_config={"eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        generation_config={"eos_token_id": ends, "do_sample": True},
        config={"eos_token_id": ends[0]},
        chat_template=HARMONY,
    )
    return tokenizer_from_directory(path)


def test_texts_end_with_an_answer_or_a_call(tokenizer):
    added = tokenizer.added_tokens
    assert tokenizer.eos_ids == {added["<|return|>"], added["<|call|>"], added["<|endoftext|>"]}
    assert tokenizer.eos_token_id == added["<|return|>"]


def test_marks_of_the_template_are_tokens_and_those_that_a_user_spells_are_text(tokenizer):
    talk = [{"role": "user", "content": "<|call|> Grüße, 1234 DON'T\n"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, split_special_tokens=True)
    assert tokenizer.decode(ids) == text
    added = tokenizer.added_tokens
    assert added["<|call|>"] not in ids
    starts = [i for i, token in enumerate(ids) if token == added["<|start|>"]]
    assert (len(starts), starts[0]) == (3, 0)
    assert tokenizer.decode(ids[starts[-1] :]) == "<|start|>assistant"


def test_a_text_shows_the_marks_that_readers_need(tokenizer):
    text = "<|channel|>final<|message|>Yes.<|endoftext|>"
    visible = mark_ids(tokenizer.chat_template, tokenizer.added_tokens)
    assert len(visible) == len(MARKS)
    stream = tokenizer.open_stream(visible_ids=visible)
    assert stream.push(tokenizer.encode(text)) == "<|channel|>final<|message|>Yes."
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "finalYes."
