"""Chat templates, rendered as Hugging Face does: Jinja in an immutable sandbox.

Source: the environment of `transformers.utils.chat_template_utils` (extensions, filters, globals).
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ssd_jax.errors import InputError

if TYPE_CHECKING:
    import jinja2


class ChatTemplate:
    """One Jinja chat template and the special tokens that it may name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], where: str) -> None:
        """Keep the source; Jinja is imported and the template compiled at the first `render`.

        Args:
          source: Jinja source.
          special_tokens: texts by role: `bos_token`, `eos_token`, ...
          where: the checkpoint's name, for error messages.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._where = where

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Raises:
          InputError: the messages are malformed, or the template refuses them or is wrong itself.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # the template is the checkpoint's code: anything may be raised
            raise InputError(
                f"the chat template of {self._where} failed: {error}; "
                "change the messages, or pass a plain prompt with --chat_template=false"
            ) from error

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def check_messages(messages: object) -> None:
    """Raise InputError unless `messages` is a list of {role, content} with string values."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(
            "messages must be a non-empty list of objects with the strings 'role' and 'content', "
            f"not {_shown(messages)}"
        )
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(
                f"messages[{position}] must be an object with the strings 'role' and 'content', "
                f"not {_shown(message)}"
            )
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = _shown(message[key]) if key in message else "missing"
                raise InputError(f"messages[{position}]: {key!r} must be a string; it is {found}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _environment() -> jinja2.Environment:
    """Return the environment that published chat templates are written for."""
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; here its body is kept."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:  # Jinja's own filter escapes HTML characters, which chat templates do not want
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
