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
from ssd_jax.wire.draft_spec import DraftMessage, DraftSpec
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import ExpandMessage, RecordMessage, Refused, shorten
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.sockets import listen_locally
from ssd_jax.wire.stream import ServeStream, StreamServer, message_size

STREAMS = 64
"""Most streams at a time: an engine has one for as long as it lives."""
FIRST_MESSAGE = 10.0
"""Seconds until a stream without a `DraftSpec` is ended."""
_MAX_EARLY = 1  # messages of an engine before its draft is loaded
_LEAVE_SECONDS = 2.0  # seconds that a stream waits for one that is just ending
_TRACEBACK = 4000  # characters of a traceback that an engine is sent
_LOG = logging.getLogger(__name__)

MakeSession = Callable[[Callable[[], bool]], DraftSession]
"""Makes a session, given a function that returns whether another round waits."""
HasLeft = Callable[[], bool]
"""Whether the engine of a stream has left, as far as is known."""
Load = Callable[[DraftSpec, HasLeft], MakeSession]
"""Loads what an engine wants; an `SsdError` is reported to the engine."""


def serve(
    session: MakeSession,
    spec: DraftSpec,
    token: str,
    *,
    streams: int = STREAMS,
    first_message: float = FIRST_MESSAGE,
) -> StreamServer:
    """Starts a server of sessions for this host, with a worker as `spec` describes it.

    Args:
      token: secret that opening a stream requires.
    """
    refusals = Refusals()

    def start(requests: Iterator[bytes]) -> Iterator[bytes]:
        inbox = _Inbox(spec, refusals)
        inbox.start(requests)
        return _answer_stream(session(inbox.round_waits), inbox.messages(first_message), refusals)

    limited = _at_most(streams, start, refusals)
    return StreamServer(limited, listen_locally(), token, message_size(spec), refusals)


def wanted_sessions(
    load: Load, size: int, refusals: Refusals, streams: int, first_message: float
) -> ServeStream:
    """Serves streams, each with the session that its engine wants.

    Args:
      size: most bytes of a message.
      refusals: logs who is refused.
      streams, first_message: see `STREAMS` and `FIRST_MESSAGE`.
    """

    def start(requests: Iterator[bytes]) -> Iterator[bytes]:
        inbox = _Inbox(_NO_SPEC, refusals)
        inbox.start(requests)
        return _load_and_answer(load, inbox, first_message, size)

    return _at_most(streams, start, refusals)


_NO_SPEC = DraftSpec(
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
        if not free.acquire(timeout=_LEAVE_SECONDS):
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

    def __init__(self, spec: DraftSpec, refusals: Refusals) -> None:
        self.spec, self.refusals = spec, refusals
        """What messages must fit, and the log of those that do not."""
        self._items: queue.SimpleQueue[DraftMessage | ProtocolError | None] = queue.SimpleQueue()
        self._num_read = self._num_handled = 0  # of rounds; one thread changes each
        self._num_early = 0  # messages from before a draft was loaded
        self.ended = threading.Event()
        """Set once the engine has left."""

    def start(self, requests: Iterator[bytes]) -> None:
        """Reads a stream in a separate thread."""
        threading.Thread(target=self.fill, args=(requests,), daemon=True).start()

    def fill(self, requests: Iterator[bytes]) -> None:
        """Reads the stream to its end."""
        try:
            for data in requests:
                max_size = message_size(self.spec)
                if self.spec is not _NO_SPEC and len(data) > max_size:
                    raise ProtocolError(f"a message of {len(data)} bytes, of {max_size} at most")
                message = codec.decode(data, self.spec)
                self._num_read += isinstance(message, RecordMessage | ExpandMessage)
                self._num_early += self.spec is _NO_SPEC
                if self._num_early > _MAX_EARLY:
                    raise ProtocolError("more messages before it was welcome")
                self._items.put(message)
        except ProtocolError as error:
            self._items.put(error)
        except Exception as error:  # whatever it is, nobody may go on waiting for messages
            _LOG.debug("a stream ended: %r", error)
            if not self._num_early and self.spec is _NO_SPEC:
                self.refusals.log("broken", f"it broke off before its first message: {error}")
        self.ended.set()
        self._items.put(None)

    def round_waits(self) -> bool:
        """Whether a request of another round waits."""
        return self._num_read > self._num_handled

    def messages(self, first_message: float) -> Iterator[DraftMessage]:
        """All messages; waits `first_message` seconds for the first.

        Raises:
          ProtocolError: a message is malformed, or none comes in time.
        """
        limit: float | None = first_message
        while True:
            try:
                message = self._items.get(timeout=limit)
            except queue.Empty:
                raise _SilentError(f"no message within {first_message:.0f} s") from None
            if message is None:
                return
            if isinstance(message, ProtocolError):
                raise message
            self._num_handled += isinstance(message, RecordMessage | ExpandMessage)
            limit = None
            yield message


def _refusal(reason: object, trace: str = "") -> bytes:
    return codec.encode(Refused(reason=shorten(reason) + trace))


def _answer_stream(
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
        trace = traceback.format_exc()[-_TRACEBACK:]
        yield _refusal(f"{type(error).__name__}: {error}", f"\n{trace}")
    finally:
        _LOG.info("a stream has ended: %s", dict(session.counters))


def _load_and_answer(load: Load, inbox: _Inbox, first_message: float, size: int) -> Iterator[bytes]:
    """Answers one stream, once the draft is loaded that its engine wants."""
    messages = inbox.messages(first_message)
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
        session = make(inbox.round_waits)
        inbox.spec = spec
    except LeftError as error:
        _LOG.info("%s", error)
    except ProtocolError as error:
        inbox.refusals.log(type(error).__name__, error)
        yield _refusal(error)
    except Exception as error:
        is_expected = isinstance(error, SsdError)
        _LOG.warning("an engine is refused: %s", error, exc_info=not is_expected)
        reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
        yield _refusal(reason)
    else:
        yield from _answer_stream(session, itertools.chain([spec], messages), inbox.refusals)
