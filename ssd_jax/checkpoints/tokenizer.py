"""The tokenizer of a checkpoint, whatever file it came from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd_jax.checkpoints.chat_template import ChatTemplate
from ssd_jax.checkpoints.token_decoding import TextStream, stream_opener
from ssd_jax.errors import InputError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """Text to token ids and back, with the special tokens and the chat template of a checkpoint.

    Attributes:
      size: one more than the last id of a token, added ones included; ids from here on are padding
        rows of the model.
      eos_ids: every id that ends a generation.
      bos_id: the id that begins a text, if the checkpoint names one.
      special_ids: ids that `decode` and `Detokenizer` skip.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        where: str,
    ) -> None:
        """Wrap a `tokenizers` tokenizer; its post-processor says whether a BOS is added.

        Args:
          backend: the tokenizer; owned by this object from now on.
          eos_ids: every id that ends a generation.
          bos_id: the id that begins a text.
          special_tokens: texts by role (`bos_token`, `eos_token`, ...), for the chat template.
          chat_template: Jinja source.
          where: the checkpoint's name, for error messages.
        """
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = (
            None
            if chat_template is None
            else ChatTemplate(chat_template, special_tokens=self._special_tokens, where=where)
        )
        self._where = where
        self._open_stream = stream_opener(backend)
        # There may be gaps between ids: the last one counts, not the number of tokens.
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the ids of `text`; the text of a special token in it becomes that token.

        Args:
          text: any text.
          add_special: add what the checkpoint puts around a text, such as a BOS.

        Raises:
          InputError: `text` holds a lone surrogate, so it has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: lone surrogate {text[error.start]!a} at character "
                f"{error.start}; pass UTF-8 text"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, padding ids nothing."""
        stream = self._open_stream()
        skipped = self.special_ids if skip_special else frozenset()
        return stream.push(i for i in ids if i not in skipped) + stream.flush()

    def open_stream(self) -> TextStream:
        """Return a decoder for one growing sequence; it skips no token by itself."""
        return self._open_stream()

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it, or None for a padding row."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint came with a chat template."""
        return self._chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template that the checkpoint came with."""
        return None if self._chat_template is None else self._chat_template.source

    def apply_chat_template(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the ids of a conversation.

        Nothing is added to what the template writes: a template that wants a BOS writes it.

        Args:
          messages: `{"role": ..., "content": ...}` with string values, in order.
          add_generation_prompt: end with the header of the assistant's turn.

        Raises:
          InputError: there is no template, it fails, or the messages are malformed.
        """
        if self._chat_template is None:
            raise InputError(
                f"{self._where} has no chat template; "
                "pass a plain prompt with --chat_template=false"
            )
        text = self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=False)

    def save(self, directory: Path) -> None:
        """Write the files that `tokenizer_from_directory` reads back to an equal tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(directory / "tokenizer.json"), pretty=False)
        generation = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)}
        _write_json(directory / "tokenizer_config.json", self._special_tokens)
        _write_json(directory / "generation_config.json", generation)
        if self._chat_template is not None:
            template = directory / "chat_template.jinja"
            template.write_text(self._chat_template.source, encoding="utf-8", newline="")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
