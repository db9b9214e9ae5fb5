"""The tokenizer of a checkpoint, from any kind of file, and comparison of two."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import tokenizers
from tokenizers import processors

from ssd_jax.checkpoints.chat.messages import checked_variables
from ssd_jax.checkpoints.chat.template import ChatTemplate
from ssd_jax.checkpoints.chat.template_files import write_templates
from ssd_jax.checkpoints.tokenizers.control_tokens import ControlTokens, reveal
from ssd_jax.checkpoints.tokenizers.detokenizer import DecodeStream, byte_reader, stream_opener
from ssd_jax.errors import InputError
from ssd_jax.system.files import brief, shown

_TENSOR_ARGUMENTS = (
    *("return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation"),
    *("max_length", "tokenizer_kwargs", "processor_kwargs"),
)
"""Arguments of transformers' `apply_chat_template` on arrays of ids, which may be false here."""


class Tokenizer:
    """Text to token ids and back, with the special tokens and the chat template of a checkpoint.

    The backend's post-processor determines whether a BOS is added. Methods have the names and the
    defaults of transformers' tokenizers.

    Args:
      backend: of the `tokenizers` package; owned by this object from now on.
      eos_ids, bos_id, chat_template: see below.
      special_tokens: texts by role (`bos_token`, `eos_token`, ...), for the chat template.
      where: the checkpoint's name, for error messages.

    Attributes:
      size: one more than the last id of a token, added ones included; ids from here on are padding
        rows of the model.
      longest: characters of the longest token, or more.
      eos_ids: all ids that end a generation.
      bos_id: the id that begins a text, if the checkpoint names one.
      special_ids: ids that `decode` and `open_stream` skip.
      chat_template: Jinja source, sources by name if there are others than `default`, or None.
      has_chat_template: whether there is one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        where: str,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._where = where
        self._template = ChatTemplate(
            chat_template, special_tokens=self._special_tokens, where=where
        )
        self.chat_template = chat_template
        self.has_chat_template = chat_template is not None
        self._open_stream = stream_opener(backend)
        self._bytes_of = byte_reader(backend)
        # Ids may have gaps: the last one counts, not the number of tokens.
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocabulary.values(), default=-1)
        self.longest = max(map(len, vocabulary), default=1)
        self.eos_ids = frozenset(i for i in eos_ids if i < self.size)  # others are never drawn
        self.bos_id = bos_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._control = ControlTokens(backend, where=where)

    @property
    def eos_token_id(self) -> int | None:
        """The id of `eos_token`; `eos_ids` has all that end a text."""
        return self._id_of("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """`bos_id`."""
        return self.bos_id

    @property
    def eos_token(self) -> str | None:
        """The token that the checkpoint names as its EOS."""
        return self._special_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        """The token that the checkpoint names as its BOS."""
        return self._special_tokens.get("bos_token")

    def _id_of(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the tokens, special or not, that texts are cut at, by their texts."""
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    @property
    def definition(self) -> str:
        """The text of a `tokenizer.json` that makes an equal backend."""
        return self._backend.to_str()

    def __len__(self) -> int:
        """`size`."""
        return self.size

    def encode(
        self, text: str, add_special_tokens: bool = True, *, split_special_tokens: bool = False
    ) -> list[int]:
        """The ids of `text`; the text of a special token in it becomes that token.

        Args:
          add_special_tokens: whether to add what the checkpoint puts around a text, such as a BOS.
          split_special_tokens: whether the text of a special token is text like any other.

        Raises:
          InputError: `text` holds a lone surrogate, so it has no UTF-8 form.
        """
        if not isinstance(text, str):
            raise InputError(f"text = {shown(text)}: encode takes one text")
        with self._encode_errors(text):
            if split_special_tokens:
                return self._control.encode_plain(text, add_special_tokens=add_special_tokens)
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    @contextlib.contextmanager
    def _encode_errors(self, text: str) -> Iterator[None]:
        """Refuses a text without a UTF-8 form, and turns a failure of the backend into the same."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode: lone surrogate {text[error.start]!a}; pass UTF-8 "
                "text"
            ) from error
        try:
            yield
        except BaseException as error:
            # Raised for a panic in Rust; `tokenizers` does not export it. Others have no type.
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(
                f"{self._where}: its tokenizer fails on this text: {brief(error)}; give another "
                "text, or get tokenizer.json again"
            ) from None

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, padding ids become nothing."""
        stream = self.open_stream(skip_special=skip_special_tokens)
        return stream.push([ids] if isinstance(ids, int) else ids) + stream.flush()

    def open_stream(
        self,
        after: int | None = None,
        *,
        skip_special: bool = True,
        visible_ids: Collection[int] = (),
    ) -> DecodeStream:
        """A stream that decodes a sequence while it grows.

        Args:
          after: the id that the sequence follows, whose text it continues: sentencepiece's space
            before its first word stays. Without it, or after a special token, a text begins, as in
            `decode`.
          visible_ids: special tokens that are not skipped.
        """
        starts_text = after is None or after in self.special_ids
        return self._open_stream(
            self.special_ids.difference(visible_ids) if skip_special else (),
            None if starts_text else after,
        )

    def token_bytes(self, token_id: int, after: int | None = None) -> bytes:
        """What a token adds to a text: perhaps part of a character.

        Args:
          after: the token before it; tokenizers whose tokens have no bytes of their own need it.
        """
        if self._bytes_of is not None:
            return self._bytes_of(token_id)
        stream = self.open_stream(after, skip_special=False)
        return (stream.push([token_id]) + stream.flush()).encode()

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, or None for a padding row."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def get_chat_template(
        self,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The Jinja source that `apply_chat_template` takes for these arguments.

        Raises:
          InputError: there is none.
        """
        return self._template.source(chat_template, tools)

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[True] = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        split_special_tokens: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The ids of a conversation, or its text.

        Nothing is added to the template's text: a template that wants a BOS writes it.

        Args:
          conversation: `{"role": ..., "content": ...}` in order; see `messages`.
          tools: JSON schemas of functions that the assistant may call.
          chat_template: name of one of the checkpoint's templates, or Jinja source to use in place
            of them. Without it, `tool_use` is taken for a conversation with tools, if there is one,
            else `default`.
          add_generation_prompt: end with the header of the assistant's turn.
          continue_final_message: end right after the content of the last message.
          tokenize: whether to return ids.
          split_special_tokens: whether a control token that a message or a tool spells is text like
            any other; those that the template writes stay tokens. See `control_tokens`.
          chat_template_kwargs, variables: further variables of the template, such as
            `enable_thinking`.

        Raises:
          InputError: there is no template, it fails, or the messages are malformed.
        """
        for name in _TENSOR_ARGUMENTS:
            if variables.pop(name, None):
                raise InputError(f"apply_chat_template makes a list of ids; leave out {name}")
        if chat_template_kwargs is not None:
            variables |= checked_variables(chat_template_kwargs)
        render = functools.partial(
            self._template.render,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            source=chat_template,
        )
        text = render(conversation, tools=tools, variables=variables)
        if not tokenize:
            return text
        if not split_special_tokens:
            return self.encode(text, add_special_tokens=False)
        strings = [[dict(message) for message in conversation], tools, variables]
        source = self.get_chat_template(chat_template, tools)
        stand_ins = self._control.stand_ins(strings, [text, source])
        if stand_ins:
            messages, schemas, values = self._control.hide(strings, stand_ins)
            rendered = render(messages, tools=schemas, variables=values)
            if reveal(rendered, stand_ins) != text:
                raise InputError(
                    f"the chat template of {self._where} does something else where a message "
                    "spells a control token; leave it out of the messages, or use "
                    "`control_tokens='parse'`"
                )
            text = rendered
        with self._encode_errors(text):
            return self._control.encode(text, stand_ins)

    def within(self, rows: int) -> Tokenizer:
        """The tokenizer for a model that embeds the ids below `rows`: added tokens beyond are text
        like any other.

        They pad what a model was trained on, or stand for images.

        Raises:
          InputError: there are more tokens that are not added, or a token beyond begins or ends
            texts or is written by the chat template.
        """
        if self.size <= rows:
            return self
        if max(self._backend.get_vocab(with_added_tokens=False).values(), default=0) >= rows:
            raise InputError(
                f"{self._where}: the tokenizer has {self.size} tokens, the model embeds {rows}; "
                "they do not belong together, or the embedding was not resized"
            )
        definition = json.loads(self.definition)
        added = definition["added_tokens"]
        beyond = {token["content"]: token["id"] for token in added if token["id"] >= rows}
        templates = self.chat_template
        sources = [templates] if isinstance(templates, str) else (templates or {}).values()
        for text, token_id in beyond.items():
            if text in (self.bos_token, self.eos_token) or any(text in s for s in sources):
                raise InputError(
                    f"{self._where}: the tokenizer gives {text!r}, which prompts or ends of texts "
                    f"need, the id {token_id}, and the model embeds {rows} ids; they do not belong "
                    "together, or the embedding was not resized"
                )
        definition["added_tokens"] = [token for token in added if token["id"] < rows]
        backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
        backend.encode_special_tokens = self._backend.encode_special_tokens
        return Tokenizer(
            backend,
            eos_ids=self.eos_ids,
            bos_id=self.bos_id,
            special_tokens={k: v for k, v in self._special_tokens.items() if v not in beyond},
            chat_template=templates,
            where=self._where,
        )

    def close(self) -> None:
        """Ends the chat template's process; another starts if it is needed again."""
        self._template.close()

    def save(self, directory: Path) -> None:
        """Writes the files that `tokenizer_from_directory` reads back to an equal tokenizer."""
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "tokenizer.json"
        file.write_text(self.definition, encoding="utf-8", newline="")
        generation = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)}
        _write_json(directory / "tokenizer_config.json", self._special_tokens)
        _write_json(directory / "generation_config.json", generation)
        write_templates(self.chat_template, directory)


def begin_with(backend: tokenizers.Tokenizer, bos_id: int) -> None:
    """Makes a backend put this token before every text encoded with special tokens."""
    bos = {"id": "BOS", "ids": [bos_id], "tokens": [backend.id_to_token(bos_id)]}
    backend.post_processor = processors.TemplateProcessing(
        single=["BOS", "$A"], pair=["BOS", "$A", "$B"], special_tokens=[bos]
    )


def first_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """The lowest id of a draft whose token is another in the target, in words, or None.

    Padding rows, which hold no token, do not count, nor do the target's tokens beyond the draft's,
    which the draft never proposes. Nor does it matter which tokens are special or end a text: a
    draft sends only ids, and the target decides when to stop.
    """
    for token_id in range(draft.size):
        tokens = [tokenizer.token(token_id) for tokenizer in (target, draft)]
        if tokens[0] != tokens[1]:
            texts = ["no token" if token is None else repr(token) for token in tokens]
            return f"id {token_id} is {texts[0]} in the target and {texts[1]} in the draft"
    return None


def require_tokens(
    target: Tokenizer, draft: Tokenizer, *, target_name: str, draft_name: str
) -> None:
    """Refuses a draft with tokens that the target does not have, since speculation exchanges ids.

    Raises:
      InputError: there is such a token; the message names the first one.
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
