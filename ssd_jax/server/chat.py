"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from ssd_jax.engine.request import RequestOutput
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.errors import invalid
from ssd_jax.server.fields import CHAT, TEMPLATE_FIELDS, includes_usage
from ssd_jax.server.generation import Generation
from ssd_jax.server.logprobs import LogprobsWriter
from ssd_jax.server.tool_calls.messages import CallWriter
from ssd_jax.server.tool_calls.request import ToolUse


def chat_prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt that messages make."""
    chosen = {name: fields[name] for name in TEMPLATE_FIELDS if name in fields}
    if fields.get("tool_choice") == "none":
        chosen.pop("tools", None)  # a model that does not see them does not call them
    return {"messages": fields["messages"], **chosen}


def chat_params(
    fields: Mapping[str, Any], defaults: SamplingParams, grammar: str | None = None
) -> SamplingParams:
    """The sampling parameters of a chat; without a limit it goes on to the end of the context.

    Args:
      grammar: of the text, if it has tool calls that are held to one.

    Raises:
      ApiError: values out of range, or in conflict.
    """
    limits = [fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields]
    if len({*limits}) > 1:
        raise invalid(
            f"max_completion_tokens = {limits[0]} and max_tokens = {limits[1]} are two names of "
            "one limit; give one",
            "max_tokens",
        )
    if fields.get("top_logprobs") and not fields.get("logprobs"):
        raise invalid("top_logprobs needs logprobs = true", "top_logprobs")
    more: dict[str, Any] = {"max_tokens": limits[0]} if limits else {}
    if fields.get("logprobs"):
        more["logprobs"] = fields.get("top_logprobs", 0)
    if grammar is not None:
        more["structured_outputs"] = {"grammar": grammar}
    return CHAT.params(fields, defaults, n=fields.get("n", 1), **more)


async def chat_response(
    generation: Generation, fields: Mapping[str, Any], tools: ToolUse | None
) -> ChatCompletion:
    """The response in one piece.

    Args:
      tools: whose calls the texts may have.
    """
    outputs = await generation.finish()

    def write() -> ChatCompletion:
        return ChatCompletion.model_validate(
            {
                **generation.identity,
                "object": "chat.completion",
                "choices": [
                    _choice(generation, fields, tools, index, output)
                    for index, output in enumerate(outputs)
                ],
                "usage": generation.usage,
                "metrics": generation.response_metrics,
            }
        )

    # A hundred thousand log-probabilities take seconds, in which other clients are not to wait.
    return await asyncio.to_thread(write) if fields.get("logprobs") else write()


def _call_writer(tools: ToolUse | None) -> CallWriter | None:
    return None if tools is None else CallWriter(tools.parser())


def _choice(
    generation: Generation,
    fields: Mapping[str, Any],
    tools: ToolUse | None,
    index: int,
    output: RequestOutput,
) -> dict[str, Any]:
    text, calls = output.outputs[0], _call_writer(tools)
    content = {"content": text.text} if calls is None else calls.message(text.text)
    choice = {
        "index": index,
        "message": {"role": "assistant", "refusal": None, **content},
        "finish_reason": _finish_reason(output, calls),
        "logprobs": None,
    }
    if text.logprobs is not None:
        writer = LogprobsWriter(generation.engine.tokenizer, output.prompt_token_ids[-1])
        choice["logprobs"] = writer.chat(text.logprobs)
    if text.stop_reason is not None:
        choice["stop_reason"] = text.stop_reason
    if fields.get("return_token_ids"):
        choice |= {"token_ids": text.token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


def _finish_reason(output: RequestOutput, calls: CallWriter | None) -> str:
    reason = output.finish_reason
    return reason if calls is None or reason != "stop" else calls.finish_reason


async def chat_chunks(
    generation: Generation, fields: Mapping[str, Any], tools: ToolUse | None
) -> AsyncGenerator[ChatCompletionChunk]:
    """The response as a stream: the role of each choice, its text and calls, why it ended."""
    usage = {"usage": None} if includes_usage(fields) else {}

    def chunk(*choices: dict[str, Any], **more: Any) -> ChatCompletionChunk:
        values = {"object": "chat.completion.chunk", "choices": list(choices), **usage, **more}
        return ChatCompletionChunk.model_validate({**generation.identity, **values})

    writers: dict[int, LogprobsWriter] = {}
    call_writers: dict[int, CallWriter | None] = {}
    async for index, event in generation.events():
        new: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
        if index not in writers:
            prompt_ids = generation.requests[0].prompt_ids
            writers[index] = LogprobsWriter(generation.engine.tokenizer, prompt_ids[-1])
            call_writers[index] = _call_writer(tools)
            content = "" if tools is None else None
            role = {"role": "assistant", "content": content, "refusal": None}
            first = {"prompt_token_ids": prompt_ids} if fields.get("return_token_ids") else {}
            yield chunk({**new, **first, "delta": role})
        calls = call_writers[index]
        tokens: dict[str, Any] = {}
        if event.logprobs:
            tokens["logprobs"] = writers[index].chat(event.logprobs)
        if fields.get("return_token_ids"):
            tokens["token_ids"] = event.token_ids
        if calls is not None:
            deltas = calls.push(event.text, is_last=event.output is not None)
        else:
            deltas = [{"content": event.text}] if event.text else []
        if any(tokens.values()) and not deltas:
            deltas = [{} if calls is not None else {"content": ""}]
        for delta in deltas:
            yield chunk({**new, **tokens, "delta": delta})
            tokens = {}  # an event's are in its first chunk
        if event.output is not None:
            text = event.output.outputs[0]
            end = {**new, "delta": {}, "finish_reason": _finish_reason(event.output, calls)}
            if text.stop_reason is not None:
                end["stop_reason"] = text.stop_reason
            yield chunk(end)
    if usage:
        yield chunk(usage=generation.usage, metrics=generation.response_metrics)
