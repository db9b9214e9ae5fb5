"""Chat templates that write tools and calls as published ones do, in few words."""

_MESSAGES = (
    "{% for m in messages %}<eot>{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}CALL{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<eot>assistant:{% endif %}"
)
_TOOLS = (
    "{% if tools %}<eot>system:{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "FORM{% endif %}"
)


def _template(form, call):
    return _TOOLS.replace("FORM", form) + _MESSAGES.replace("CALL", call)


HERMES = _template(
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>',
)
LLAMA = _template(
    'Respond with {"name": function name, "parameters": its arguments}.',
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}',
)
QWEN3_CODER = _template(
    "<tool_call>\n<function=name>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function={{ call.function.name }}>\n</function>\n</tool_call>",
)
