"""Log-probabilities in the two forms of OpenAI's interface."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.engine.request import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks; OpenAI's interface has the same number."""


class LogprobsWriter:
    """Writes the log-probabilities of one text, in one piece or chunk by chunk.

    Args:
      after: the token that the text follows, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer, after: int | None) -> None:
        self._tokenizer, self._after = tokenizer, after
        self._offset = 0  # of the next token, in characters of the text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def chat(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`logprobs` of a choice of a chat completion, or of a chunk of one."""
        content = []
        for entry in entries:
            top = [self._chat_token(token, value) for token, value in entry.top]
            content.append(self._chat_token(entry.token_id, entry.logprob) | {"top_logprobs": top})
            self._after = entry.token_id
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, value: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token, self._after)
        text = data.decode(errors="replace")
        return {"token": text, "logprob": max(value, LOWEST), "bytes": [*data]}

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """`logprobs` of a choice of a completion, or of a chunk of one.

        Args:
          token_ids: the tokens of `entries`, which are None for a token that follows nothing.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(token_ids, entries, strict=True):
            tokens.append(self._text(token))
            offsets.append(self._offset)
            values.append(None if entry is None else max(entry.logprob, LOWEST))
            tops.append(None if entry is None else self._top(entry))
            data = self._tokenizer.token_bytes(token, self._after)
            self._offset += len(self._utf8.decode(data))
            self._after = token
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by text, and the token itself, as OpenAI has it."""
        top: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._text(token), max(value, LOWEST))
        return top

    def _text(self, token: int) -> str:
        """A token's text; one that is part of a character is spelled as `bytes:\\xe2\\x96`."""
        data = self._tokenizer.token_bytes(token, self._after)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
