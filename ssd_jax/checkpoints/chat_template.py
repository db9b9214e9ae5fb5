"""Chat templates, rendered as by Hugging Face, in a separate process (`template_child`)."""

from __future__ import annotations

import contextlib
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

from ssd_jax.errors import InputError, SsdError
from ssd_jax.system.files import shown
from ssd_jax.system.forks import owned

SECONDS = 2.0
"""Seconds of processor time that a template may take for a conversation."""

MEMORY = 256 << 20
"""Bytes of memory that it may take, where the system can limit them (not on macOS)."""

MOST_TEXT = 16 << 20
"""Characters that a template may write."""

_WALL_SECONDS = 20.0
"""Seconds of wall-clock time, for a template that waits instead of working."""

_START_SECONDS = 60.0
_PROGRAM = Path(__file__).with_name("template_child.py")


class ChatTemplate:
    """One Jinja chat template and the special tokens that it may name.

    Safe to use from several threads, and in forks of this process. The rendering process starts at
    the first `render`, lives until `close` or as long as this object, and ends with this program
    however that ends.

    Args:
      source: Jinja source.
      special_tokens: texts by role: `bos_token`, `eos_token`, ...
      where: the checkpoint's name, for error messages.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], where: str) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._where = where
        self._child = _Child(os.getpid())

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """The text of a conversation.

        Raises:
          InputError: the messages are malformed, or the template refuses them, is itself wrong, or
            exceeds a limit of time or memory.
          SsdError: the process does not start.
        """
        _check_messages(messages)
        if self._child.owner != os.getpid():  # forked: the pipes and perhaps the lock are another's
            self._child = _Child(os.getpid())
        plain = [dict(message) for message in messages]
        request = [self._source, self._special_tokens, plain, add_generation_prompt]
        try:
            data = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            failed, text = True, f"messages must be plain JSON values ({error})"
        else:
            failed, text = self._child.render(data)
        if failed:
            raise InputError(
                f"the chat template of {self._where} failed: {text}; "
                "change the messages, or pass a plain prompt with --chat_template=false"
            )
        return text

    def close(self) -> None:
        """Ends the process, if there is one; the next `render` starts another."""
        if self._child.owner == os.getpid():
            self._child.close()


def _check_messages(messages: object) -> None:
    """Refuses anything except a list of {role, content} with string values."""
    wanted = "with the strings 'role' and 'content'"
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(
            f"messages must be a non-empty list of objects {wanted}, not {shown(messages)}"
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"messages[{place}] must be an object {wanted}, not {shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = shown(message[key]) if key in message else "missing"
                raise InputError(f"messages[{place}]: {key!r} must be a string; it is {found}")


class _Child:
    """The rendering process of one owner, a process id."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection

    def render(self, request: bytes) -> tuple[bool, str]:
        """Whether the template failed or reached a limit, and its text or the reason."""
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                answer = self._answer(request, _WALL_SECONDS)
            except BaseException:  # after an interrupt, an answer that belongs to no one is left
                self._drop()
                raise
            if answer is None:
                self._drop()
                return True, f"it took more than {SECONDS:g} s or {MEMORY >> 20} MB"
        return bool(answer[0]), answer[1:].decode("utf-8", "surrogatepass")

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._link = Connection(ours.detach())
        told = (MEMORY, SECONDS, MOST_TEXT, theirs.fileno())
        # Last the place of the program, whose files must not hide others; hooks are no paths.
        entries = [*sys.path[1:], *sys.path[:1]]
        path = os.pathsep.join(entry for entry in entries if Path(entry).is_absolute())
        try:
            self._process = process = subprocess.Popen(
                # -P: modules next to the program must not hide others
                [sys.executable, "-P", str(_PROGRAM), *map(str, told)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # an interrupt from the terminal is meant for this process
            )
        except OSError as error:
            raise SsdError(f"chat templates: {sys.executable}: {error.strerror}") from None
        finally:
            theirs.close()
        self._end = weakref.finalize(self, owned(_end), process, self._link)
        self._end.atexit = False  # threads may render at exit; the socket closes with this process
        if self._answer(None, _START_SECONDS) is None:
            raise SsdError(
                "the process for chat templates did not start; pass plain prompts with "
                "--chat_template=false"
            )

    def _answer(self, request: bytes | None, seconds: float) -> bytes | None:
        """The answer to a request, or to none; None if the process has ended, or had to be."""
        assert self._process is not None
        limit = threading.Timer(seconds, self._process.kill)
        limit.daemon = True
        with contextlib.suppress(RuntimeError):  # from Python 3.12 on none starts as programs end
            limit.start()
        try:
            if request is not None:
                self._link.send_bytes(request)
            return self._link.recv_bytes(4 * MOST_TEXT + 1)
        except (EOFError, OSError):
            return None
        finally:
            limit.cancel()

    def _drop(self) -> None:
        if self._process is not None:
            self._end()
            self._process = None


def _end(process: subprocess.Popen[bytes], link: Connection) -> None:
    process.kill()
    process.wait()
    link.close()
