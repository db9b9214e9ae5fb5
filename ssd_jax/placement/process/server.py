"""The worker's end of the streams; each has one session, with its own slots."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator

from ssd_jax.errors import SsdError
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.roles.drafting import Drafting
from ssd_jax.wire import codec
from ssd_jax.wire.messages import (
    DraftMessage,
    DraftSpec,
    ExpandMessage,
    ProtocolError,
    RecordMessage,
    Refused,
    shorten,
)
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.sockets import listen_locally
from ssd_jax.wire.stream import ServeStream, StreamServer, message_size

STREAMS = 64
"""Most streams at a time: an engine has one for as long as it lives."""
GREETING = 10.0
"""Seconds until a stream without a `DraftSpec` is ended."""
_EARLY = 1  # messages of an engine before its draft is loaded
_LEAVING = 2.0  # seconds that a stream waits for one that is just ending
_TRACEBACK = 4000  # characters of a traceback that an engine is sent
_LOG = logging.getLogger(__name__)

MakeSession = Callable[[Callable[[], bool]], DraftSession]
"""Makes a session, given a function that returns whether another round waits."""
Gone = Callable[[], bool]
"""Whether the engine of a stream has left, as far as is known."""
Load = Callable[[DraftSpec, Gone], MakeSession]
"""Loads what an engine wants; an `SsdError` is reported to the engine."""


def serve(
    session: MakeSession,
    about: DraftSpec,
    token: str,
    *,
    streams: int = STREAMS,
    greeting: float = GREETING,
) -> StreamServer:
    """Starts a server of sessions for this host, with a worker as `about` describes it.

    Args:
      token: secret that opening a stream requires.
    """
    refusals = Refusals()

    def start(requests: Iterator[bytes]) -> Iterator[bytes]:
        inbox = _Inbox(about, refusals)
        inbox.start(requests)
        return _answers(session(inbox.called), inbox.messages(greeting), refusals)

    limited = _at_most(streams, start, refusals)
    return StreamServer(limited, listen_locally(), token, message_size(about), refusals)


def wanted_sessions(
    load: Load, size: int, refusals: Refusals, streams: int, greeting: float
) -> ServeStream:
    """Serves streams, each with the session that its engine wants.

    Args:
      size: most bytes of a message.
      refusals: logs who is refused.
      streams, greeting: see `STREAMS` and `GREETING`.
    """

    def start(requests: Iterator[bytes]) -> Iterator[bytes]:
        inbox = _Inbox(_NOTHING, refusals)
        inbox.start(requests)
        return _loaded(load, inbox, greeting, size)

    return _at_most(streams, start, refusals)


_NOTHING = DraftSpec(
    model="",
    slots=0,
    context=0,
    tokens=0,
    drafting=Drafting(k=0, support=0, rule="ratio"),
    budgets=(0,),
    dtype="",
)


def _at_most(streams: int, answers: ServeStream, refusals: Refusals) -> ServeStream:
    """Serves `streams` streams at a time, and refuses others with a message."""
    free = threading.BoundedSemaphore(streams)

    def stream(requests: Iterator[bytes]) -> Iterator[bytes]:
        if not free.acquire(timeout=_LEAVING):
            reason = f"it serves {streams} engines already, and no more; close some"
            refusals.log("streams", reason)
            yield _refusal(reason)
            return
        try:
            yield from answers(requests)
        finally:
            free.release()

    return stream


class LeftError(ProtocolError):
    """The engine has left before it was answered, which is nothing to refuse it for."""


class _SilentError(ProtocolError):
    """The first message did not come."""


class _Inbox:
    """Messages of one stream, read ahead; the last item is None."""

    def __init__(self, about: DraftSpec, refusals: Refusals) -> None:
        self.about, self.refusals = about, refusals
        """What messages must fit, and the log of those that do not."""
        self._items: queue.SimpleQueue[DraftMessage | ProtocolError | None] = queue.SimpleQueue()
        self._read, self._handled = 0, 0  # requests of rounds; each is changed by one thread only
        self._waiting = 0  # messages from before a draft was loaded
        self.ended = threading.Event()
        """Set once the engine has left."""

    def start(self, requests: Iterator[bytes]) -> None:
        """Reads a stream in a separate thread."""
        threading.Thread(target=self.fill, args=(requests,), daemon=True).start()

    def fill(self, requests: Iterator[bytes]) -> None:
        """Reads the stream to its end."""
        try:
            for data in requests:
                most = message_size(self.about)
                if self.about is not _NOTHING and len(data) > most:
                    raise ProtocolError(f"a message of {len(data)} bytes, of {most} at most")
                message = codec.decode(data, self.about)
                self._read += isinstance(message, RecordMessage | ExpandMessage)
                self._waiting += self.about is _NOTHING
                if self._waiting > _EARLY:
                    raise ProtocolError("more messages before it was welcome")
                self._items.put(message)
        except ProtocolError as error:
            self._items.put(error)
        except Exception as error:  # whatever it is, nobody may go on waiting for messages
            _LOG.debug("a stream ended: %r", error)
            if not self._waiting and self.about is _NOTHING:
                self.refusals.log("broken", f"it broke off before its first message: {error}")
        self.ended.set()
        self._items.put(None)

    def called(self) -> bool:
        """Whether a request of another round waits."""
        return self._read > self._handled

    def messages(self, greeting: float) -> Iterator[DraftMessage]:
        """All messages; waits `greeting` seconds for the first.

        Raises:
          ProtocolError: a message is malformed, or none comes in time.
        """
        limit: float | None = greeting
        while True:
            try:
                message = self._items.get(timeout=limit)
            except queue.Empty:
                raise _SilentError(f"no message within {greeting:.0f} s") from None
            if message is None:
                return
            if isinstance(message, ProtocolError):
                raise message
            self._handled += isinstance(message, RecordMessage | ExpandMessage)
            limit = None
            yield message


def _refusal(reason: object, where: str = "") -> bytes:
    return codec.encode(Refused(reason=shorten(reason) + where))


def _answers(
    session: DraftSession, messages: Iterable[DraftMessage], refusals: Refusals
) -> Iterator[bytes]:
    """Answers one stream; a breach of the protocol ends this stream only."""
    try:
        for message in messages:
            for answer in session.handle(message):
                yield codec.encode(answer)
    except ProtocolError as error:
        refusals.log(type(error).__name__, error)
        yield _refusal(error)
    except Exception as error:
        _LOG.exception("a stream failed")
        where = traceback.format_exc()[-_TRACEBACK:]
        yield _refusal(f"{type(error).__name__}: {error}", f"\n{where}")
    finally:
        _LOG.info("a stream has ended: %s", dict(session.counters))


def _loaded(load: Load, inbox: _Inbox, greeting: float, size: int) -> Iterator[bytes]:
    """Answers one stream, once the draft is loaded that its engine wants."""
    messages = inbox.messages(greeting)
    try:
        spec = next(messages, None)
        if spec is None:
            return
        if not isinstance(spec, DraftSpec):
            raise ProtocolError(f"a {type(spec).__name__} before it was said what is wanted")
        if message_size(spec) > size:
            raise ProtocolError(
                f"messages of up to {message_size(spec)} bytes, and {size} are allowed; "
                "lower `slots`, `context` or `budget`"
            )
        make = load(spec, inbox.ended.is_set)  # keeps what was loaded as long as it is referenced
        session = make(inbox.called)
        inbox.about = spec
    except LeftError as error:
        _LOG.info("%s", error)
    except ProtocolError as error:
        inbox.refusals.log(type(error).__name__, error)
        yield _refusal(error)
    except Exception as error:
        known = isinstance(error, SsdError)
        _LOG.warning("an engine is refused: %s", error, exc_info=not known)
        reason = str(error) if known else f"{type(error).__name__}: {error}"
        yield _refusal(reason)
    else:
        yield from _answers(session, itertools.chain([spec], messages), inbox.refusals)
