"""The form of Llama 3.1 and 3.2: a text that is an object, perhaps behind `<|python_tag|>`."""

from ssd_jax.server.tool_calls.json_form import JsonForm

LLAMA3_JSON = JsonForm(
    name="llama3_json",
    begin="<|python_tag|>",
    unmarked=True,
    separator="; ",
    arguments="parameters",
    in_templates=r'(?s)"name\\?"\s*:.*"parameters\\?"\s*:',
    in_others=r"<tool_call>|\[TOOL_CALLS\]",
)
