"""The conversation: its messages, which of them fit the context, and its file."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import ROW_KEYS, BadLine, prompt_line, read_json_lines
from ssd_jax.system.atomic import write_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message.

    Attributes:
      content: its text, or what else a file had there.
      stopped: whether it is an answer that the user cut off.
      others: further keys that a file had, such as `tool_calls`.
    """

    role: str
    content: Any
    stopped: bool = False
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def as_prompt(self) -> dict[str, Any]:
        """The message as the chat template gets it."""
        return {"role": self.role, "content": self.content, **self.others}

    def as_dict(self) -> dict[str, Any]:
        """The message as it is written to a file."""
        value = self.as_prompt()
        return value | {"stopped": True} if self.stopped else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """A system message, if any, and the messages after it."""

    system: str | None = None
    messages: tuple[Message, ...] = ()

    def with_message(self, role: str, content: str, *, stopped: bool = False) -> Conversation:
        """The conversation with one more message."""
        message = Message(role=role, content=content, stopped=stopped)
        return dataclasses.replace(self, messages=(*self.messages, message))

    def without_answer(self) -> Conversation:
        """The conversation up to and including the user's last message.

        Raises:
          InputError: there is no message of the user.
        """
        user_indices = [i for i, message in enumerate(self.messages) if message.role == "user"]
        if not user_indices:
            raise InputError("there is no message to answer again; type one first")
        return dataclasses.replace(self, messages=self.messages[: user_indices[-1] + 1])

    def prompt(self, first: int = 0) -> list[dict[str, Any]]:
        """Chat messages for the model: the system message, and the others from `first` on."""
        system = [] if self.system is None else [Message(role="system", content=self.system)]
        return [message.as_prompt() for message in (*system, *self.messages[first:])]

    def first_that_fits(self, size: Callable[[int], int], max_tokens: int, start: int = 0) -> int:
        """Leaves out whole turns, the oldest first, as far as needed.

        Args:
          size: tokens of the prompt that starts at a message.
          max_tokens: most tokens it may have.
          start: messages before it are left out already.

        Returns: where the prompt starts: at the user's last message if even that is too long.
        """
        turns = [i for i, m in enumerate(self.messages) if i > start and m.role == "user"]
        first = start
        for index in turns:
            if size(first) <= max_tokens:
                break
            first = index
        return first


def save(conversation: Conversation, path: Path, *, replace: bool = False) -> bool:
    """Writes the conversation as one line of a prompt file (gzip where the name ends in .gz).

    Returns: whether a file was replaced.

    Raises:
      InputError: the file exists and may not be replaced, or it cannot be written.
    """
    messages = [message.as_dict() for message in conversation.messages]
    if conversation.system is not None:
        messages = [{"role": "system", "content": conversation.system}, *messages]
    data = (json.dumps({"messages": messages}, ensure_ascii=False) + "\n").encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    try:
        exists = path.exists()
        if exists and not path.is_file():
            raise InputError(f"{path} is no file; give another name")
        if exists and not replace:
            raise InputError(
                f"{path} exists and was left as it is; give another name, or /save! {path} to "
                "replace it"
            )
        write_file(path, data)
        return exists
    except OSError as error:
        raise InputError(
            f"{path}: not saved: {error.strerror or error}; give another name"
        ) from None


def load(path: Path) -> Conversation:
    """Reads a conversation that `save` wrote, or any prompt file of one {"messages": ...} line.

    Raises:
      InputError: the file cannot be read, or it does not hold one conversation.
    """
    loaded = read_json_lines(path, _conversation)
    if len(loaded) != 1:
        raise InputError(f"{path} has {len(loaded)} conversations; /load takes a file with one")
    if isinstance(loaded[0], BadLine):
        raise InputError(f"{loaded[0].where}: {loaded[0].error}")
    return loaded[0]


def _conversation(line: Mapping[str, Any]) -> Conversation:
    loaded = prompt_line(line)
    if loaded.messages is None:
        raise ValueError('needs "messages"; a "prompt" is no conversation')
    for key in (*loaded.chat, *loaded.others):
        if key not in ROW_KEYS:
            raise ValueError(f'a chat takes no "{key[:40]}" from a file; leave it out')
    messages = [
        Message(
            role=item["role"],
            content=item.get("content"),
            stopped=fields.get("stopped") is True,
            others={key: item[key] for key in item if key not in ("role", "content")},
        )
        for item, fields in zip(loaded.messages, line["messages"], strict=True)
    ]
    first = messages[0]
    plain = first.role == "system" and isinstance(first.content, str) and not first.others
    system = messages.pop(0).content if plain else None
    return Conversation(system=system, messages=tuple(messages))
