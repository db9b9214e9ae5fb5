"""The grammar that a request's text is held to, from OpenAI's, vLLM's and our own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd_jax.server.errors import invalid
from ssd_jax.system.files import shown


def asked_grammar(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The setting `structured_outputs`, if a field asks for it.

    Raises:
      ApiError: several do, or it is none of OpenAI's formats.
    """
    asked: dict[str, Any] = {}
    if (outputs := _of_format(fields.get("response_format"))) is not None:
        asked["response_format"] = outputs
    if "grammar" in fields:
        asked["grammar"] = {"grammar": fields["grammar"]}
    if "structured_outputs" in fields:
        asked["structured_outputs"] = fields["structured_outputs"]
    if len(asked) > 1:
        raise invalid(f"{' and '.join(asked)} say what a text may be; give one", next(iter(asked)))
    return dict.fromkeys(["structured_outputs"], *asked.values()) if asked else {}


def _of_format(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The grammar that a response format stands for; None for text.

    Raises:
      ApiError: none of OpenAI's formats.
    """
    field = "response_format"
    if response_format is None or response_format == {"type": "text"}:
        return None
    if response_format == {"type": "json_object"}:
        return {"json_object": True}
    others = response_format.keys() - {"type", "json_schema"}
    if response_format.get("type") != "json_schema" or others:
        raise invalid(
            f"response_format = {shown(response_format)}: its type is text, json_object, or "
            'json_schema with a "json_schema" beside it',
            field,
        )
    described = response_format.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise invalid(
            'response_format.json_schema is an object with a "schema", a JSON schema', field
        )
    return {"json": described["schema"]}
