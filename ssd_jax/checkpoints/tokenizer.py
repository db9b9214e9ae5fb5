"""The tokenizer of a checkpoint, from any kind of file, and comparison of two."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from ssd_jax.checkpoints.chat_template import ChatTemplate
from ssd_jax.checkpoints.detokenizer import DecodeStream, stream_opener
from ssd_jax.errors import InputError
from ssd_jax.system.files import brief


class Tokenizer:
    """Text to token ids and back, with the special tokens and the chat template of a checkpoint.

    The backend's post-processor determines whether a BOS is added.

    Args:
      backend: of the `tokenizers` package; owned by this object from now on.
      eos_ids, bos_id, chat_template: see below.
      special_tokens: texts by role (`bos_token`, `eos_token`, ...), for the chat template.
      where: the checkpoint's name, for error messages.

    Attributes:
      size: one more than the last id of a token, added ones included; ids from here on are padding
        rows of the model.
      eos_ids: all ids that end a generation.
      bos_id: the id that begins a text, if the checkpoint names one.
      special_ids: ids that `decode` and `open_stream` skip.
      chat_template, has_chat_template: Jinja source or None, and whether there is one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        where: str,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._where = where
        self._template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, special_tokens=self._special_tokens, where=where)
        )
        self.chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self._open_stream = stream_opener(backend)
        # Ids may have gaps: the last one counts, not the number of tokens.
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_ids = frozenset(i for i in eos_ids if i < self.size)  # others are never drawn
        self.bos_id = bos_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of `text`; the text of a special token in it becomes that token.

        Args:
          add_special: whether to add what the checkpoint puts around a text, such as a BOS.

        Raises:
          InputError: `text` holds a lone surrogate, so it has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: lone surrogate {text[error.start]!a}; pass UTF-8 "
                "text"
            ) from error
        try:
            return self._backend.encode(text, add_special_tokens=add_special).ids
        except BaseException as error:
            # Raised for a panic in Rust; `tokenizers` does not export it. Others have no type.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"{self._where}: its tokenizer fails on this text: {brief(error)}; give another "
                "text, or get tokenizer.json again"
            ) from None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, padding ids become nothing."""
        stream = self.open_stream(skip_special=skip_special)
        return stream.push(ids) + stream.flush()

    def open_stream(self, after: int | None = None, *, skip_special: bool = True) -> DecodeStream:
        """A stream that decodes a sequence while it grows.

        Args:
          after: the id that the sequence follows, whose text it continues: sentencepiece's space
            before its first word stays. Without it, or after a special token, a text begins, as in
            `decode`.
        """
        begins = after is None or after in self.special_ids
        return self._open_stream(
            self.special_ids if skip_special else (), None if begins else after
        )

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None for a padding row."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation.

        Nothing is added to the template's text: a template that wants a BOS writes it.

        Args:
          messages: `{"role": ..., "content": ...}` with string values, in order.
          add_generation_prompt: end with the header of the assistant's turn.

        Raises:
          InputError: there is no template, it fails, or the messages are malformed.
        """
        if self._template is None:
            raise InputError(
                f"{self._where} has no chat template; "
                "pass a plain prompt with --chat_template=false"
            )
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=False)

    def close(self) -> None:
        """Ends the chat template's process; another starts if it is needed again."""
        if self._template is not None:
            self._template.close()

    def save(self, directory: Path) -> None:
        """Writes the files that `tokenizer_from_directory` reads back to an equal tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        written = directory / "tokenizer.json"
        written.write_text(self._backend.to_str(), encoding="utf-8", newline="")
        generation = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)}
        _write_json(directory / "tokenizer_config.json", self._special_tokens)
        _write_json(directory / "generation_config.json", generation)
        if self.chat_template is not None:
            template = directory / "chat_template.jinja"
            template.write_text(self.chat_template, encoding="utf-8", newline="")


def begin_with(backend: tokenizers.Tokenizer, bos_id: int) -> None:
    """Makes a backend put this token before every text encoded with special tokens."""
    bos = {"id": "BOS", "ids": [bos_id], "tokens": [backend.id_to_token(bos_id)]}
    backend.post_processor = processors.TemplateProcessing(
        single=["BOS", "$A"], pair=["BOS", "$A", "$B"], special_tokens=[bos]
    )


def first_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """The lowest id whose tokens differ, in words, or None if the vocabularies are equal.

    Padding rows, which hold no token, do not count. Nor does it matter which tokens are special or
    end a text: a draft sends only ids, and the target decides when to stop.
    """
    for token_id in range(max(target.size, draft.size)):
        found = [each.token(token_id) for each in (target, draft)]
        if found[0] != found[1]:
            shown = ["no token" if token is None else repr(token) for token in found]
            return f"id {token_id} is {shown[0]} in the target and {shown[1]} in the draft"
    return None


def require_same(target: Tokenizer, draft: Tokenizer, *, target_name: str, draft_name: str) -> None:
    """Refuses a draft with another vocabulary, since speculation exchanges token ids.

    Raises:
      InputError: the vocabularies differ; the message names the first difference.
    """
    difference = first_difference(target, draft)
    if difference is not None:
        raise InputError(
            f"the draft {draft_name} ({draft.size} tokens) does not have the vocabulary of the "
            f"target {target_name} ({target.size} tokens): {difference}; use a draft with the "
            "target's tokenizer"
        )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
