"""The routes of the server."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ssd_jax import __version__
from ssd_jax.server import status
from ssd_jax.server.access_log import AccessLog, open_log, record_error
from ssd_jax.server.chat import chat_chunks, chat_params, chat_prompt, chat_response
from ssd_jax.server.completions import (
    completion_chunks,
    completion_params,
    completion_prompts,
    completion_response,
    echoed,
)
from ssd_jax.server.errors import ApiError
from ssd_jax.server.fields import CHAT, COMPLETION
from ssd_jax.server.gates import ConnectionGate, KeyGate
from ssd_jax.server.generation import open_answer
from ssd_jax.server.openapi import document
from ssd_jax.server.posts import Handler, Post
from ssd_jax.server.state import ServerState
from ssd_jax.server.streaming import EventStream, as_json
from ssd_jax.server.tokens import detokenize, tokenize
from ssd_jax.server.tool_calls.messages import check_messages
from ssd_jax.server.tool_calls.request import read_tool_use


def make_app(state: ServerState) -> Starlette:
    """The ASGI application of a server."""

    page = status.page()

    async def models(_: Request) -> Response:
        return _json({"object": "list", "data": [_model(state)]})

    async def model(request: Request) -> Response:
        state.require_model(request.path_params["name"])
        return _json(_model(state))

    async def live(_: Request) -> Response:
        failure = state.engine.failure
        return _json({"status": failure or "live"}, 200 if failure is None else 503)

    async def ready(_: Request) -> Response:
        reason = state.why_not_ready
        return _json({"status": reason or "ready"}, 200 if reason is None else 503)

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(_: Request) -> Response:
        return Response(state.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def tokenizer_info(_: Request) -> Response:
        tokenizer = state.engine.tokenizer
        names = ("bos_token", "eos_token", "chat_template")
        return _json({name: getattr(tokenizer, name) for name in names})

    async def status_page(_: Request) -> Response:
        return HTMLResponse(page, headers=status.HEADERS)

    async def status_figures(_: Request) -> Response:
        return _json(status.figures(state))

    async def openapi(_: Request) -> Response:
        return _json(document(state.model))

    def post(path: str, handle: Handler) -> Route:
        return Route(path, Post(state, handle), methods=["POST"])

    return Starlette(
        routes=[
            post("/v1/chat/completions", _chat),
            post("/v1/completions", _complete),
            post("/tokenize", _tokenize),
            post("/detokenize", _detokenize),
            Route("/tokenizer_info", tokenizer_info),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", ready),
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/version", version),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
            Route("/", status_page),
            Route("/status.json", status_figures),
        ],
        exception_handlers={ApiError: _of_api, HTTPException: _of_http},
        middleware=_middleware(state),
    )


def _middleware(state: ServerState) -> list[Middleware]:
    """What requests pass on their way to a route, outermost first."""
    options, chosen = state.options, []
    if options.access_log is not None:
        handler = open_log(options.access_log)
        chosen.append(Middleware(AccessLog, handler, texts=options.logs_texts))
    if options.origins:
        chosen.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["Retry-After"],
            )
        )
    if options.most_connections is not None:
        chosen.append(Middleware(ConnectionGate, state, options.most_connections))
    if options.keys:
        chosen.append(Middleware(KeyGate, state))
    return chosen


async def _chat(state: ServerState, body: dict[str, Any], stack: contextlib.ExitStack) -> ASGIApp:
    fields = CHAT.read(body)
    state.require_model(fields.get("model"))
    tokenizer = state.engine.tokenizer
    prompt, template = chat_prompt(fields), None
    if tokenizer.has_chat_template:
        with CHAT.refusing(fields):
            template = tokenizer.get_chat_template(tools=prompt.get("tools"))
    check_messages(fields["messages"], template)
    tools = read_tool_use(fields, state.options.tool_parser, template)
    grammar = None if tools is None else tools.grammar(tokenizer)
    params = chat_params(fields, state.engine.defaults, grammar)
    state.require_ready()
    place = stack.enter_context(state.admission.admit(params.n, priority=fields.get("priority", 0)))
    visible_ids = frozenset() if tools is None else tools.visible_ids(tokenizer)
    with CHAT.refusing(fields):
        answer = await open_answer(state, place, "chatcmpl", [prompt], params, fields, visible_ids)
    if fields.get("stream"):
        return EventStream(chat_chunks(answer, fields, tools))
    return _json_text(as_json(await chat_response(answer, fields, tools)))


async def _complete(
    state: ServerState, body: dict[str, Any], stack: contextlib.ExitStack
) -> ASGIApp:
    fields = COMPLETION.read(body)
    state.require_model(fields.get("model"))
    prompts = completion_prompts(fields)
    params = completion_params(fields, state.engine.defaults)
    state.require_ready()
    counted = "n" if params.n > 1 else "prompt"
    place = stack.enter_context(
        state.admission.admit(params.n * len(prompts), counted, fields.get("priority", 0))
    )
    with COMPLETION.refusing(fields):
        ids = [await state.engine.prompt_ids(prompt) for prompt in prompts]
        objects = [{"prompt_token_ids": prompt_ids} for prompt_ids in ids]
        answer = await open_answer(state, place, "cmpl", objects, params, fields)
    echoes = echoed(prompts, state.engine.tokenizer) if fields.get("echo") else []
    if fields.get("stream"):
        return EventStream(completion_chunks(answer, fields, echoes))
    return _json_text(as_json(await completion_response(answer, fields, echoes)))


async def _tokenize(
    state: ServerState, body: dict[str, Any], _stack: contextlib.ExitStack
) -> Response:
    return _json_text(as_json(await tokenize(state, body)))


async def _detokenize(
    state: ServerState, body: dict[str, Any], _stack: contextlib.ExitStack
) -> Response:
    return _json_text(as_json(await detokenize(state, body)))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model,
        "object": "model",
        "created": state.created,
        "owned_by": "ssd_jax",
        "max_model_len": state.engine.context,
    }


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _json_text(text: str) -> Response:
    return Response(text, media_type="application/json")


async def _of_api(_: Request, error: Any) -> Response:
    """The response to an `ApiError`."""
    record_error(error.code or error.message)
    return error.response()


async def _of_http(request: Request, error: Any) -> Response:
    """The response to an `HTTPException`: no such path or method."""
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response
