"""Chat templates, chosen and rendered as by Hugging Face, the latter in a separate process
(`template_child`)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ssd_jax.checkpoints.chat.messages import checked_messages, checked_tools, require_named
from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.forks import only_in_owner

MAX_SECONDS = 2.0
"""Seconds of processor time that a template may take for a conversation."""

MAX_MEMORY = 256 << 20
"""Bytes of memory that it may take, where the system can limit them (not on macOS)."""

MAX_TEXT = 16 << 20
"""Characters that a template may write."""

_MAX_WALL_SECONDS = 20.0
"""Seconds of wall-clock time, for a template that waits instead of working."""

_START_SECONDS = 60.0
_PROGRAM = Path(__file__).with_name("template_child.py")


DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template of a conversation, and of one with tools."""


class ChatTemplate:
    """The Jinja chat template of a model, or several by name, and the special tokens that they may
    name.

    Safe to use from several threads, and in forks of this process. The rendering process starts at
    the first `render`, lives until `close` or as long as this object, and ends with this program
    however that ends.

    Args:
      sources: Jinja source, or sources by name; None where each `render` must give one.
      special_tokens: texts by role: `bos_token`, `eos_token`, ...
      where: the checkpoint's name, for error messages.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str] | None,
        *,
        special_tokens: Mapping[str, str],
        where: str,
    ) -> None:
        self._sources = {DEFAULT: sources} if isinstance(sources, str) else dict(sources or {})
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._child = _Child(os.getpid())

    def source(self, name_or_source: str | None = None, tools: object = None) -> str:
        """The Jinja source for a conversation.

        Args:
          name_or_source: of a template; None takes `tool_use` if there is one and
            there are `tools`, else `default`.

        Raises:
          InputError: there is no such template.
        """
        if name_or_source is not None:
            return self._sources.get(name_or_source, name_or_source)
        name = TOOL_USE if tools is not None and TOOL_USE in self._sources else DEFAULT
        if name in self._sources:
            return self._sources[name]
        if not self._sources:
            raise InputError(
                f"{self._where} has no chat template; pass a plain prompt with "
                "`chat_template=False`"
            )
        raise InputError(
            f"{self._where} has the chat templates {', '.join(sorted(self._sources))} and none "
            f"named {DEFAULT}; choose one with chat_template='{min(self._sources)}'"
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        source: str | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: see `checked_messages`.
          add_generation_prompt: end with the header of the assistant's turn.
          continue_final_message: end within the last message, right after its content.
          tools: JSON schemas of functions that the assistant may call.
          variables: further variables of the template.
          source: a name or a source, see `source`.

        Raises:
          InputError: there is no template, the messages are malformed, or the template refuses
            them, is itself wrong, or exceeds a limit of time or memory.
          SsdError: the process does not start.
        """
        where = self._where if source is None or source in self._sources else "chat_template"
        source = self.source(source, tools)
        if continue_final_message and add_generation_prompt:
            raise InputError(
                "continue_final_message goes on within the last message, and "
                "add_generation_prompt begins another one; leave out one"
            )
        conversation = checked_messages(messages, source)
        for name in variables or ():
            require_named(name, source, where)
        context = {
            "documents": None,
            **(variables or {}),
            "tools": checked_tools(tools, source, where),
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return self._render(source, conversation, context, where)
        # As transformers does: a mark behind the last content shows where it ends, and the space
        # behind the mark whether the template keeps white space there.
        (mark,) = unused_characters([source, conversation, context], 1)
        conversation[-1]["content"] += f"{mark} "
        text = self._render(source, conversation, context, where)
        head, mark_found, tail = text.rpartition(mark)
        if not mark_found:
            raise InputError(
                f"the chat template of {where} leaves out the last message, so it cannot be "
                "continued; leave out continue_final_message"
            )
        return head if tail.startswith(" ") else head.rstrip()

    def _render(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        where: str,
    ) -> str:
        if self._child.owner != os.getpid():  # forked: the pipes and perhaps the lock are another's
            self._child = _Child(os.getpid())
        request = [source, {**self._special_tokens, **variables, "messages": messages}]
        failed, text = self._child.render(_json(request).encode())
        if failed:
            raise InputError(
                f"the chat template of {where} failed: {text}; "
                "change the messages, or pass a plain prompt with `chat_template=False`"
            )
        return text

    def close(self) -> None:
        """Ends the process, if there is one; the next `render` starts another."""
        if self._child.owner == os.getpid():
            self._child.close()


def unused_characters(value: object, count: int) -> str:
    """Private characters that occur nowhere in a value that JSON can express."""
    used = set(_json(value, ensure_ascii=False))
    unused = (character for character in map(chr, range(0xE000, 0xF900)) if character not in used)
    characters = "".join(itertools.islice(unused, count))
    if len(characters) < count:
        raise InputError("the messages use all private characters of Unicode; leave some out")
    return characters


def _json(value: object, *, ensure_ascii: bool = True) -> str:
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"messages and tools must be plain JSON values ({error})") from None


class _Child:
    """The rendering process of one owner, a process id."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection

    def render(self, request: bytes) -> tuple[bool, str]:
        """Whether the template failed or reached a limit, and its text or the reason."""
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                answer = self._exchange(request, _MAX_WALL_SECONDS)
            except BaseException:  # after an interrupt, an answer that belongs to no one is left
                self._stop()
                raise
            if answer is None:
                self._stop()
                return True, f"it took more than {MAX_SECONDS:g} s or {MAX_MEMORY >> 20} MB"
        return bool(answer[0]), answer[1:].decode("utf-8", "surrogatepass")

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> None:
        parent, child = socket.socketpair()
        self._connection = Connection(parent.detach())
        arguments = (MAX_MEMORY, MAX_SECONDS, MAX_TEXT, child.fileno())
        # Last the place of the program, whose files must not hide others; hooks are no paths.
        entries = [*sys.path[1:], *sys.path[:1]]
        path = os.pathsep.join(entry for entry in entries if Path(entry).is_absolute())
        try:
            self._process = process = subprocess.Popen(
                # -P: modules next to the program must not hide others
                [sys.executable, "-P", str(_PROGRAM), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[child.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # an interrupt from the terminal is meant for this process
            )
        except OSError as error:
            raise SsdError(f"chat templates: {sys.executable}: {error.strerror}") from None
        finally:
            child.close()
        self._finalizer = weakref.finalize(
            self, only_in_owner(_end_process), process, self._connection
        )
        # Threads may render at exit, and the socket closes with this process.
        self._finalizer.atexit = False
        if self._exchange(None, _START_SECONDS) is None:
            raise SsdError(
                "the process for chat templates did not start; pass plain prompts with "
                "`chat_template=False`"
            )

    def _exchange(self, request: bytes | None, seconds: float) -> bytes | None:
        """The answer to a request, or to none; None if the process has ended, or had to be."""
        assert self._process is not None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # from Python 3.12 on none starts as programs end
            timer.start()
        try:
            if request is not None:
                self._connection.send_bytes(request)
            return self._connection.recv_bytes(4 * MAX_TEXT + 1)
        except (EOFError, OSError):
            return None
        finally:
            timer.cancel()

    def _stop(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.kill()
    process.wait()
    connection.close()
