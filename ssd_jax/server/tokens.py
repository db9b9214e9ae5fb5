"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ssd_jax.server.chat import chat_prompt
from ssd_jax.server.errors import invalid
from ssd_jax.server.fields import DETOKENIZE, TOKENIZE
from ssd_jax.server.state import ServerState


class Tokenized(BaseModel):
    """Ids, their number, and most tokens of the model's context."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    """A text."""

    prompt: str


async def tokenize(state: ServerState, body: Mapping[str, Any]) -> Tokenized:
    """The ids of a text, or of messages in the chat template.

    Raises:
      ApiError: neither, or both, or they cannot be encoded.
    """
    fields = TOKENIZE.read(body)
    state.require_model(fields.get("model"))
    if ("prompt" in fields) == ("messages" in fields):
        raise invalid("give one of prompt and messages", "prompt")
    with TOKENIZE.refusing(fields):
        if "messages" in fields:
            tokens = await state.engine.encode_chat(chat_prompt(fields))
        else:
            special = fields.get("add_special_tokens", True)
            tokens = await state.engine.prompt_ids(fields["prompt"], add_special_tokens=special)
    return Tokenized(count=len(tokens), max_model_len=state.engine.context, tokens=tokens)


async def detokenize(state: ServerState, body: Mapping[str, Any]) -> Detokenized:
    """The text of ids, control tokens included.

    Raises:
      ApiError: an id that is none.
    """
    fields = DETOKENIZE.read(body)
    state.require_model(fields.get("model"))
    tokenizer, tokens = state.engine.tokenizer, fields["tokens"]
    for token in tokens:
        if not 0 <= token < tokenizer.size:
            raise invalid(
                f"tokens: id {token} is not in the vocabulary; ids are 0 to {tokenizer.size - 1}",
                "tokens",
            )
    return Detokenized(prompt=await asyncio.to_thread(tokenizer.decode, tokens))
