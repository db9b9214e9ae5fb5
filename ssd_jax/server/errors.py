"""Errors as OpenAI's interface reports them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from ssd_jax.errors import InputError

_KINDS = {
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_MOST_MESSAGE, _MOST_PARAM = 2000, 200
"""Characters: a request is not to be sent back whole."""
_UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "tool_choice": "none, auto, required, or an object that names a function",
}
"""What fields of several types take."""


class ErrorObject(BaseModel):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of a response to a request that is not answered, also an event of a stream."""

    error: ErrorObject


@dataclasses.dataclass
class ApiError(Exception):
    """A request that is not answered.

    Attributes:
      status: of the response.
      message: what is wrong, with the value, the limit and the remedy.
      param: the field of the request that it is about.
      code: a name for programs.
      retry_after: seconds after which the request may be repeated.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @property
    def body(self) -> Refusal:
        """The body of the response, also of an event of a stream."""
        return Refusal(
            error=ErrorObject(
                message=self.message[:_MOST_MESSAGE],
                type=_KINDS.get(self.status, "invalid_request_error"),
                param=None if self.param is None else self.param[:_MOST_PARAM],
                code=self.code,
            )
        )

    def response(self) -> Response:
        """The response."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        content = self.body.model_dump_json()
        return Response(content, self.status, headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that is wrong in itself."""
    return ApiError(400, message, param, code)


def of_validation(error: ValidationError) -> ApiError:
    """The first thing that pydantic found wrong in a body."""
    first, *more = error.errors(include_url=False, include_context=False)
    field = str(first["loc"][0])
    if any(other["loc"][0] == field for other in more) and field in _UNIONS:
        return invalid(f"{field} is {_UNIONS[field]}; give one of these", field, "invalid_type")
    path = [part for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    if first["type"] == "extra_forbidden":
        return invalid(f"{param}: there is no such field; leave it out", param, "unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"{param} is missing; give it", param, "missing_required_parameter")
    return invalid(f"{param}: {first['msg'].lower()}", param or None, "invalid_type")


def of_input(error: InputError, fields: Mapping[str, str]) -> ApiError:
    """What the engine refuses, with its setting under the name that the request has for it.

    Args:
      fields: the names of fields by those of settings and of what prompts are called in messages.
    """
    message = str(error)
    match = re.match(r"(?:the )?(\w+)", message)
    word = "" if match is None else match[1]
    param = fields.get(word)
    if param is None:
        return invalid(message)
    if word == "prompt" and "context" in message:
        return invalid(message, param, "context_length_exceeded")
    return invalid(re.sub(rf"^{word}\b", param, message), param)
