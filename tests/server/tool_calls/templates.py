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
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if tools_in_user_message is not defined %}{% set tools_in_user_message = true %}{% endif %}
{%- if date_string is not defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- macro head(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{%- macro described(tools) %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}
{%- endmacro %}
{%- set system = "" %}
{%- if messages[0]["role"] == "system" %}
    {%- set system, messages = messages[0]["content"] | trim, messages[1:] %}
{%- endif %}
{{- head("system") }}
{%- if builtin_tools is defined or tools is not none %}Environment: ipython\n{% endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}{{ described(tools) }}{% endif %}
{{- system + "<|eot_id|>" }}
{%- if tools is not none and tools_in_user_message %}
    {%- if not messages %}{{ raise_exception("there is no user message for the tools") }}{% endif %}
    {{- head("user") + described(tools) + messages[0]["content"] | trim + "<|eot_id|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- head("assistant") + '{"name": "' + function.name + '", "parameters": ' }}
        {{- function.arguments | tojson }}}<|eot_id|>
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- head("ipython") }}
        {%- if message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- head(message["role"]) + message["content"] | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head("assistant") }}{% endif %}
"""
"""What Llama 3.1's, 3.2's and 3.3's do: where tools and results stand, and one call a message."""

QWEN3_CODER = _template(
    "<tool_call>\n<function=name>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function={{ call.function.name }}>\n</function>\n</tool_call>",
)
