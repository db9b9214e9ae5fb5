"""The OpenAPI document of the routes."""

from __future__ import annotations

from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ssd_jax import __version__
from ssd_jax.server.errors import Refusal
from ssd_jax.server.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from ssd_jax.server.tokens import Detokenized, Tokenized

_REF = "#/components/schemas/{model}"
_POSTS: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    "/v1/chat/completions": (CHAT.model, ChatCompletion),
    "/v1/completions": (COMPLETION.model, Completion),
    "/tokenize": (TOKENIZE.model, Tokenized),
    "/detokenize": (DETOKENIZE.model, Detokenized),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions")
_REFUSALS = {
    "400": "the request is wrong; `param` names the field",
    "401": "no key, or none of the server's",
    "404": "another model",
    "408": "the body did not arrive",
    "413": "the body is too large",
    "429": "too many texts run or wait",
    "500": "the server has failed",
    "503": "the server is not ready, about to end, or has too many connections",
    "504": "the texts have not ended in time",
}


def document(model: str) -> dict[str, Any]:
    """The document of a server of the model with this name."""
    models = [model_type for pair in _POSTS.values() for model_type in pair]
    _, schemas = models_json_schema(
        [(model_type, "validation") for model_type in (*models, Refusal)], ref_template=_REF
    )
    definitions = schemas["$defs"]
    for request, _ in _POSTS.values():
        # Null, or an empty name, is the model that is served.
        definitions[request.__name__]["properties"]["model"]["enum"] = [model, "", None]
    return {
        "openapi": "3.1.0",
        "info": {"title": "ssd_jax", "version": __version__},
        "paths": {path: {"post": _post(path)} for path in _POSTS} | _gets(),
        "components": {"schemas": definitions},
    }


def _post(path: str) -> dict[str, Any]:
    request, answer = _POSTS[path]
    content = {"application/json": _schema(answer)}
    if path in _STREAMED:
        content["text/event-stream"] = {}
    refusals = {
        status: {"description": text, "content": {"application/json": _schema(Refusal)}}
        for status, text in _REFUSALS.items()
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": _schema(request)}},
        "responses": {"200": {"description": "the answer", "content": content}, **refusals},
    }


def _gets() -> dict[str, Any]:
    """Paths without a body, with what their status 200 says."""
    described = {
        "/tokenizer_info": "the tokenizer's control tokens and chat template",
        "/v1/models": "the model, in a list",
        "/health": "requests are taken",
        "/health/live": "no device has failed",
        "/health/ready": "requests are taken",
        "/metrics": "counters for Prometheus",
        "/version": "the version of the package",
        "/openapi.json": "this document",
        "/": "a page that shows how the server is",
        "/status.json": "the figures of this page",
    }
    paths: dict[str, Any] = {}
    for path, text in described.items():
        responses = {"200": {"description": text}}
        if path.startswith("/health"):
            responses["503"] = {"description": "it is not so; `status` says why"}
        paths[path] = {"get": {"responses": responses}}
    return paths


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model.__name__)}}
