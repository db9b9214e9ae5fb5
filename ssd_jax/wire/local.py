"""Streams between processes of one host: frames over a socket that no other user can reach.

The thread that has a message sends it, and one thread receives. This takes half of the core time of
gRPC's threads, and nothing waits for their turn.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator

from ssd_jax.wire import codec
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.messages import Refused
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.stream import Answers, StreamError

_BEAT, _SILENCE = 0.5, 2.0  # seconds between two beats, and until one counts as missed
_KNOCK = 10.0  # seconds to send the token
_STRANGERS = 64  # connections that have not sent it yet; the oldest makes room for another
_TOKEN = 2**10  # bytes
_PAUSE = 0.1  # seconds after a connection could not be accepted
_BACKLOG = 128
_UNIX = "unix:"
_LOG = logging.getLogger(__name__)


class LocalStream:
    """See `stream.Stream`; a thread of the worker sends beats, however long it computes."""

    def __init__(self, address: str, token: str, size: int) -> None:
        self.heard = False
        self._trouble = ""
        self._frames: Frames | None = None
        try:
            self._frames = Frames(_connected(address), _SILENCE, most=size)
            self._frames.send(token.encode())
        except OSError as error:
            self._trouble = error.strerror or str(error)

    def send(self, data: bytes) -> None:
        """See `stream.Stream.send`."""
        if self._frames is not None:
            try:
                self._frames.send(data)
            except OSError:  # a part may have been sent: no other frame can follow it
                self._frames.close()

    def flush(self, timeout: float) -> bool:
        """See `stream.Stream.flush`: it has left when `send` returns."""
        del timeout
        return True

    def answers(self) -> Iterator[bytes]:
        """See `stream.Stream.answers`."""
        if self._frames is None:
            raise StreamError(self._trouble)
        while True:
            try:
                frame = self._frames.receive()
            except OSError as error:
                raise StreamError(self._frames.why(error)) from None
            self.heard = True
            if frame:
                yield frame

    def close(self) -> None:
        """See `stream.Stream.close`."""
        if self._frames is not None:
            self._frames.close()


def _connected(address: str) -> socket.socket:
    if address.startswith(_UNIX):
        found = socket.socket(socket.AF_UNIX)
        where: str | tuple[str, int] = address.removeprefix(_UNIX)
    else:
        found = socket.socket(socket.AF_INET)
        host, _, port = address.rpartition(":")
        where = (host, int(port))
    try:
        found.settimeout(_PAUSE)  # a listener accepts at once
        found.connect(where)
    except BaseException:
        found.close()
        raise
    return found


class LocalServer:
    """Serves streams that only this host, and on Linux only this user, can reach.

    Args:
      answers: serves one stream.
      token: secret that opening a stream requires.
      size: most bytes of a message.
      refusals: logs who is refused.

    Attributes:
      address: for `LocalStream`.
    """

    def __init__(self, answers: Answers, token: str, size: int, refusals: Refusals) -> None:
        self._answers, self._token, self._size = answers, token.encode(), size
        self._refusals = refusals
        self._listener, self._file, self.address = _listen()
        self._changing, self._closed = threading.Lock(), threading.Event()
        self._open: set[Frames] = set()
        self._strangers: dict[Frames, None] = {}  # oldest first
        threading.Thread(target=self._accept, name="draft streams", daemon=True).start()

    def stop(self) -> None:
        """Ends all streams, and accepts no more."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._file is not None:
            os.close(self._file)
        with self._changing:
            for each in self._open:
                each.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                found, _ = self._listener.accept()
                self._begin(Frames(found, None, most=self._size))
            except (OSError, RuntimeError) as error:  # no file or thread to be had, or the end
                _LOG.debug("no stream is taken: %s", error)
                self._closed.wait(_PAUSE)

    def _begin(self, frames: Frames) -> None:
        with self._changing:
            self._open.add(frames)
            self._strangers[frames] = None
            if len(self._strangers) > _STRANGERS:
                next(iter(self._strangers)).close()
        try:
            threading.Thread(target=self._serve, args=(frames,), daemon=True).start()
        except RuntimeError:
            self._end(frames)
            raise

    def _serve(self, frames: Frames) -> None:
        try:
            if self._knows_the_token(frames):
                frames.send(b"")
                frames.beat(_BEAT)
                for answer in self._answers(_said(frames), lambda: False):
                    frames.send(answer)
        except OSError as error:
            _LOG.debug("a stream ended: %s", error)
        finally:
            self._end(frames)

    def _end(self, frames: Frames) -> None:
        with self._changing:
            self._strangers.pop(frames, None)
            self._open.discard(frames)
        frames.close()

    def _knows_the_token(self, frames: Frames) -> bool:
        known = hmac.compare_digest(frames.first(_KNOCK, most=_TOKEN), self._token)
        with self._changing:
            self._strangers.pop(frames, None)
        if not known:
            self._refusals.say("token", "it does not know the token")
            frames.send(codec.encode(Refused(reason="its token is another")))
        return known


def _said(frames: Frames) -> Iterator[bytes]:
    while True:
        if frame := frames.receive():
            yield frame


def _listen() -> tuple[socket.socket, int | None, str]:
    """A listening socket, a file that names it, and its address for another process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # no /proc, or no directory to write to
            return _unnamed()
    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    return listener, None, f"127.0.0.1:{listener.getsockname()[1]}"


def _unnamed() -> tuple[socket.socket, int, str]:
    """A Unix socket whose name is removed at once, so that no file is left however a process ends.

    Its address is the worker's open file in /proc, which is as private as the process itself. The
    name is relative to an open directory, since some paths are too long for a socket's name.
    """
    directory = tempfile.mkdtemp(prefix="ssd-jax-")
    listener = socket.socket(socket.AF_UNIX)
    try:
        inside = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{inside}/draft")
            listener.listen(_BACKLOG)
            file = os.open("draft", os.O_PATH, dir_fd=inside)
        finally:
            os.close(inside)
    except BaseException:
        listener.close()
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return listener, file, f"{_UNIX}/proc/{os.getpid()}/fd/{file}"
