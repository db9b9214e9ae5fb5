"""Chat templates, rendered as Hugging Face does, in a process of their own (`TemplateProcess`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.checkpoints.template_process import TemplateError, TemplateProcess
from ssd_jax.errors import InputError
from ssd_jax.files import shown


class ChatTemplate:
    """One Jinja chat template and the special tokens that it may name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], where: str) -> None:
        """Keep the source; the process starts and compiles it at the first `render`.

        Args:
          source: Jinja source.
          special_tokens: texts by role: `bos_token`, `eos_token`, ...
          where: the checkpoint's name, for error messages.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._process = TemplateProcess()

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Raises:
          InputError: the messages are malformed, or the template refuses them, is wrong itself, or
            takes more time or memory than `template_process` allows.
        """
        check_messages(messages)
        try:
            return self._process.render(
                self.source,
                self._special_tokens,
                messages,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise InputError(
                f"the chat template of {self._where} failed: {error}; "
                "change the messages, or pass a plain prompt with --chat_template=false"
            ) from None


def check_messages(messages: object) -> None:
    """Raise InputError unless `messages` is a list of {role, content} with string values."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(
            "messages must be a non-empty list of objects with the strings 'role' and 'content', "
            f"not {shown(messages)}"
        )
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"messages[{position}] must be an object with the strings 'role' and 'content', "
                f"not {shown(message)}"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = shown(message[key]) if key in message else "missing"
                raise InputError(f"messages[{position}]: {key!r} must be a string; it is {found}")
