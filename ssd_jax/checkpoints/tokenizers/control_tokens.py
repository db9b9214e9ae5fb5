"""Texts in which a spelled control token stays text, though a chat template's are tokens.

Control tokens are a tokenizer's special ones, such as <|im_end|>, and its marks of tool calls. The
strings of messages get stand-ins, private characters, for the first character of each spelling, so
that in the template's text only the template's spellings are left. Those are exchanged for aliases:
tokens of a copy of the tokenizer, in which control tokens are not looked for. That copy then
encodes the whole text at once, cut where the tokenizer itself would cut it, and the aliases become
the tokens again.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ssd_jax.checkpoints.chat.template import unused_characters
from ssd_jax.errors import InputError
from ssd_jax.system.files import shown

CALL_MARKS = ("<tool_call>", "</tool_call>")
"""Marks around tool calls, tokens of many tokenizers, which few of them declare special."""


class ControlTokens:
    """The control tokens of a tokenizer, and its encodings that tell whose spelling they are.

    Args:
      backend: a tokenizer, which does not change any more.
      where: the checkpoint's name, for error messages.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, where: str) -> None:
        self._backend, self._where = backend, where
        self._secret = secrets.token_hex(16)  # so that no text spells an alias
        added = backend.get_added_tokens_decoder()
        self._tokens = {
            i: token
            for i, token in added.items()
            if token.content and (token.special or token.content in CALL_MARKS)
        }
        spellings = [re.escape(token.content) for token in self._tokens.values()]
        # A lookahead: spellings may overlap.
        self._start = (
            re.compile(f"(?=(?:{'|'.join(spellings)}))(.)", re.DOTALL) if spellings else None
        )

    def stand_ins(self, value: object, others: object) -> dict[str, str]:
        """A private character for every first character of the control tokens.

        Args:
          value: of JSON, whose spellings are to be hidden.
          others: what else no stand-in may occur in.

        Returns: nothing if no text in `value` spells a control token.
        """
        if not self._spells(value):
            return {}
        first_characters = sorted({token.content[0] for token in self._tokens.values()})
        return dict(
            zip(
                first_characters,
                unused_characters([value, others], len(first_characters)),
                strict=True,
            )
        )

    def _spells(self, value: object) -> bool:
        if isinstance(value, str):
            return self._start is not None and self._start.search(value) is not None
        if isinstance(value, Mapping):
            return any(map(self._spells, [*value, *value.values()]))
        return isinstance(value, list | tuple) and any(map(self._spells, value))

    def hide(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        """`value` with the first character of each spelled control token exchanged."""
        if isinstance(value, str):
            if self._start is None:
                return value
            return self._start.sub(lambda match: stand_ins[match[1]], value)
        if isinstance(value, Mapping):
            return {
                self.hide(key, stand_ins): self.hide(item, stand_ins) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, stand_ins) for item in value]
        return value

    def encode_plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text of which no spelling is a control token.

        Raises:
          InputError: the tokenizer has no other form of a spelled control token.
        """
        return self._encode(text, [], add_special_tokens=add_special_tokens)

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Ids of a text in which the spellings with stand-ins are plain, and the others tokens.

        Raises:
          InputError: see `encode_plain`.
        """
        plain_text = reveal(text, stand_ins)
        encoding = self._backend.encode(text, add_special_tokens=False)
        parts, control_ids, end = [], [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            token = self._tokens.get(token_id)
            # The span may include white space that the token takes in.
            token_start = -1 if token is None else text.find(token.content, start, stop)
            if token is not None and token_start >= 0:
                parts += [plain_text[end:token_start], self._alias(token_id)]
                control_ids.append(token_id)
                end = token_start + len(token.content)
        return self._encode(
            "".join([*parts, plain_text[end:]]), control_ids, add_special_tokens=False
        )

    def _encode(
        self, text: str, control_ids: Sequence[int], *, add_special_tokens: bool
    ) -> list[int]:
        copy, id_of_alias = self._copy
        encoding = copy.encode(text, add_special_tokens=add_special_tokens)
        tokens = zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, strict=True)
        for token_id, (start, stop), is_added in tokens:
            token = self._tokens.get(token_id)
            if token is not None and not is_added and token.content in text[start:stop]:
                raise InputError(
                    f"{self._where}: its tokenizer has no plain form of {shown(token.content)}; "
                    "leave it out of the text, or use `control_tokens='parse'`"
                )
        if [id_of_alias[i] for i in encoding.ids if i in id_of_alias] != list(control_ids):
            raise InputError(
                f"{self._where}: its control tokens depend on the text around them, so they cannot "
                "be told apart from spelled ones; use `control_tokens='parse'`"
            )
        return [id_of_alias.get(i, i) for i in encoding.ids]

    def _alias(self, token_id: int) -> str:
        return f"\ue000{self._secret}-{token_id}\ue001"

    @functools.cached_property
    def _copy(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer with aliases in place of control tokens, and what its aliases stand for."""
        definition = self._backend.to_str()
        if not all(token.special for token in self._tokens.values()):
            fields = json.loads(definition)
            for token in fields["added_tokens"]:
                token["special"] |= token["content"] in CALL_MARKS
            definition = json.dumps(fields)
        copy = tokenizers.Tokenizer.from_str(definition)
        copy.encode_special_tokens = True
        if self._backend.encode_special_tokens:  # then a template's are text, too
            return copy, {}
        aliases = {
            token_id: AddedToken(
                self._alias(token_id),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for token_id, token in self._tokens.items()
        }
        copy.add_tokens([*aliases.values()])
        added = copy.get_added_tokens_decoder()
        id_of_text = {alias.content: token_id for token_id, alias in aliases.items()}
        return copy, {
            i: id_of_text[token.content]
            for i, token in added.items()
            if token.content in id_of_text
        }


def reveal(text: str, stand_ins: Mapping[str, str]) -> str:
    """A text with the characters that the stand-ins stand for."""
    return text.translate({ord(private): character for character, private in stand_ins.items()})
