"""The form of Hermes, Qwen2.5 and Qwen3: objects within `<tool_call>` and `</tool_call>`."""

from ssd_jax.checkpoints.tokenizers.control_tokens import CALL_MARKS
from ssd_jax.server.tool_calls.json_form import JsonForm

HERMES = JsonForm(
    name="hermes",
    begin=CALL_MARKS[0],
    end=CALL_MARKS[1],
    inner="\n",
    separator="\n",
    arguments="arguments",
    in_templates=r'(?s)<tool_call>.*"arguments\\?"\s*:|"arguments\\?"\s*:.*<tool_call>',
    in_others=r"<function=|<arg_key>",  # Qwen3-Coder's and GLM's, which are not JSON
)
