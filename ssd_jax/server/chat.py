"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk

from ssd_jax.engine.request import RequestOutput
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.server.errors import invalid
from ssd_jax.server.fields import CHAT, TEMPLATE_FIELDS, includes_usage
from ssd_jax.server.generation import Generation
from ssd_jax.server.logprobs import LogprobsWriter


def chat_prompt(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt that messages make."""
    chosen = {name: fields[name] for name in TEMPLATE_FIELDS if name in fields}
    return {"messages": fields["messages"], **chosen}


def chat_params(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a chat; without a limit it goes on to the end of the context.

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
    return CHAT.params(fields, defaults, n=fields.get("n", 1), **more)


async def chat_response(generation: Generation, fields: Mapping[str, Any]) -> ChatCompletion:
    """The response in one piece."""
    outputs = await generation.finish()
    return ChatCompletion.model_validate(
        {
            **generation.identity,
            "object": "chat.completion",
            "choices": [
                _choice(generation, fields, index, output) for index, output in enumerate(outputs)
            ],
            "usage": generation.usage,
            "metrics": generation.response_metrics,
        }
    )


def _choice(
    generation: Generation, fields: Mapping[str, Any], index: int, output: RequestOutput
) -> dict[str, Any]:
    text = output.outputs[0]
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": text.text, "refusal": None},
        "finish_reason": text.finish_reason,
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


async def chat_chunks(
    generation: Generation, fields: Mapping[str, Any]
) -> AsyncGenerator[ChatCompletionChunk]:
    """The response as a stream: the role of each choice, its text, why it ended."""
    usage = {"usage": None} if includes_usage(fields) else {}

    def chunk(*choices: dict[str, Any], **more: Any) -> ChatCompletionChunk:
        values = {"object": "chat.completion.chunk", "choices": list(choices), **usage, **more}
        return ChatCompletionChunk.model_validate({**generation.identity, **values})

    writers: dict[int, LogprobsWriter] = {}
    async for index, event in generation.events():
        new: dict[str, Any] = {"index": index, "finish_reason": None}
        if index not in writers:
            prompt_ids = generation.requests[0].prompt_ids
            writers[index] = LogprobsWriter(generation.engine.tokenizer, prompt_ids[-1])
            role = {"role": "assistant", "content": "", "refusal": None}
            first = {"prompt_token_ids": prompt_ids} if fields.get("return_token_ids") else {}
            yield chunk({**new, **first, "delta": role, "logprobs": None})
        logprobs = writers[index].chat(event.logprobs) if event.logprobs else None
        if event.text or logprobs or (fields.get("return_token_ids") and event.token_ids):
            ids = {"token_ids": event.token_ids} if fields.get("return_token_ids") else {}
            yield chunk({**new, **ids, "delta": {"content": event.text}, "logprobs": logprobs})
        if event.output is not None:
            text = event.output.outputs[0]
            end = {**new, "delta": {}, "finish_reason": text.finish_reason, "logprobs": None}
            if text.stop_reason is not None:
                end["stop_reason"] = text.stop_reason
            yield chunk(end)
    if usage:
        yield chunk(usage=generation.usage, metrics=generation.response_metrics)
