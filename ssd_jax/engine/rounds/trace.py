"""Traces of engines, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

A trace holds a process for each engine, with a lane each for target, draft and host. Slices of the
target's lane are spans of `activity.TargetTimes`: from dispatch until the outcome was read. A draft
with devices of its own reports its slices; a draft on the target's devices has none.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.engine.origin import TextSpan
from ssd_jax.errors import InputError
from ssd_jax.roles.activity import Busy
from ssd_jax.system.atomic import new_file
from ssd_jax.system.paths import require_writable, user_path

PRODUCER, FORMAT = "ssd_jax", 1
"""In files, under `otherData`; the format is raised when a reader of the old one would fail."""
LANES = {"target": 1, "draft": 2, "host": 3}
"""Thread ids of the lanes; the id of each further draft worker is `OF_A_WORKER` higher."""
OF_A_WORKER = 10
MAX_EVENTS = 100_000
"""Events that are kept, the first ones: about 10,000 rounds."""
MAX_BYTES = 96 << 20
"""Limit of a file; with many slots it is reached before `MAX_EVENTS`."""
_EVENT_BYTES, _ROW_BYTES, _NUMBER_BYTES = 176, 96, 8
"""Upper bounds for an event without its rows, a row without its tokens, and one number."""

_LOG = logging.getLogger(__name__)


class Event(NamedTuple):
    """A slice of a lane; times in seconds."""

    engine: int
    lane: str
    name: str
    begin: float
    end: float
    args: Mapping[str, Any]
    worker: int = 0


class Trace:
    """Events of all engines of one model, kept in memory until they are written.

    Args:
      path: the file; its directory must exist. An existing file is replaced.
      most: events to keep; later ones are only counted.
      zero: clock time, in seconds, that is 0 in the file.

    Raises:
      InputError: no file can be written there.
    """

    def __init__(
        self, path: str | Path, *, max_events: int = MAX_EVENTS, zero: float | None = None
    ) -> None:
        path = self.path = user_path(str(path)).absolute()
        require_writable("trace", path, atomic=True)
        if path.is_dir():
            raise InputError(f"trace = '{path}' is a directory; give a file such as trace.json")
        if not path.parent.is_dir():
            reason = f"there is no directory '{path.parent}'; make it first"
            raise InputError(f"trace = '{path}': {reason}")
        self._max_events = max_events
        self._zero = time.perf_counter() if zero is None else zero
        self._engines: list[tuple[str, bool]] = []
        self._events: list[Event] = []
        self._dropped = self._bytes = 0

    def engine(self, name: str, *, shared_device: bool = False) -> EngineTrace:
        """Adds a process to the trace; `shared_device` if the draft works in the target's lane."""
        self._engines.append((name, shared_device))
        return EngineTrace(self, len(self._engines))

    def add(self, event: Event) -> None:
        """Adds a slice."""
        self._bytes += _most_bytes(event)
        if len(self._events) < self._max_events and self._bytes <= MAX_BYTES:
            self._events.append(event)
        else:
            self._dropped += 1

    def lengthen(self, arguments: dict[str, Any], name: str, values: Sequence[Any]) -> None:
        """Appends values to a list among the arguments of an event that was added."""
        self._bytes += len(json.dumps([name, values]))
        if not self._dropped and self._bytes <= MAX_BYTES:
            arguments.setdefault(name, []).extend(values)

    def write(self) -> None:
        """Writes the whole file or nothing; writes none if nothing was traced.

        Raises:
          OSError: the file cannot be written; with its name and the reason.
        """
        if not self._events:
            return
        try:
            with new_file(self.path) as file:
                header = {"producer": PRODUCER, "format": FORMAT, "dropped": self._dropped}
                file.write(f'{{"otherData": {json.dumps(header)},\n"traceEvents": [\n'.encode())
                for place, event in enumerate(self._chrome_events()):
                    file.write((",\n" * bool(place) + json.dumps(event)).encode())
                file.write(b"\n]}\n")
        except OSError as error:
            message = f"the trace was not written: {error.strerror or error}"
            raise OSError(error.errno, message, str(self.path)) from error

    def write_at_the_end(self) -> None:
        """Writes the file at exit, when no caller could handle an error: errors are logged."""
        try:
            self.write()
        except OSError as error:
            _LOG.warning("%s: %s", error.filename, error.strerror)

    def _chrome_events(self) -> Iterator[dict[str, Any]]:
        used = {event.engine for event in self._events}
        for number, (name, shared) in enumerate(self._engines, start=1):
            if number not in used:
                continue
            yield _metadata("process_name", number, 0, name)
            for lane, thread in LANES.items():
                title = "target and draft (one device)" if shared and lane == "target" else lane
                yield _metadata("thread_name", number, thread, title)
        for number, worker in sorted({(e.engine, e.worker) for e in self._events if e.worker}):
            thread = LANES["draft"] + worker * OF_A_WORKER
            yield _metadata("thread_name", number, thread, f"draft {worker + 1}")
        for event in self._events:
            begin, end = (1e6 * (t - self._zero) for t in (event.begin, event.end))
            yield {
                "ph": "X",
                "pid": event.engine,
                "tid": LANES[event.lane] + event.worker * OF_A_WORKER,
                "name": event.name,
                "ts": round(begin, 3),
                "dur": round(max(0.0, end - begin), 3),
                "args": event.args,
            }


class RowTrace(NamedTuple):
    """A slot in a round; field names are the file's.

    Attributes:
      source: see `Drafted.sources`.
      L, k: proposed and accepted tokens.
      tokens: committed ids.
      prepared: bonus tokens that branches were prepared for, by the k of the round before.
    """

    slot: int
    request: int
    source: str | None
    L: int
    k: int
    tokens: Sequence[int]
    prepared: Sequence[Sequence[int]] = ()


class EngineTrace:
    """One engine's lanes. Times are seconds of the engine's clock."""

    def __init__(self, trace: Trace, number: int) -> None:
        self._trace, self._number = trace, number
        self._rounds = 0
        self._host = 0.0
        self._drafted: dict[int, float] = {}  # until when, by worker
        self._last: dict[int, dict[str, Any]] = {}  # of its last round, by request

    def prefill(self, span: tuple[float, float], request: int, tokens: int) -> None:
        """Adds that the target has finished a prompt."""
        args = self._last[request] = {"request": request, "tokens": tokens}
        self._trace.add(Event(self._number, "target", "prefill", *span, args))

    def round(self, span: tuple[float, float], rows: Sequence[RowTrace]) -> None:
        """Adds a round: the target verified, or decoded a token a row; no rows if all had ended."""
        self._last |= {row.request: _content(row) for row in rows}
        args = {"round": self._rounds, "rows": [self._last[row.request] for row in rows]}
        self._rounds += 1
        self._trace.add(Event(self._number, "target", _name(rows), *span, args))

    def text(self, request: int, spans: Sequence[TextSpan], *, last: bool) -> None:
        """Adds text of a request to its last round or prefill; `last` if no more will come."""
        arguments = self._last.get(request)
        if arguments is not None and spans:
            self._trace.lengthen(arguments, "spans", spans)
        if last:
            self._last.pop(request, None)

    def draft(self, spans: Iterable[Busy]) -> None:
        """Adds the work that the draft has reported."""
        for span in spans:
            # A new comparison of the clocks may differ from the last by its error.
            begin = max(span.begin, self._drafted.get(span.worker, 0.0))
            end = self._drafted[span.worker] = max(span.end, begin)
            lane = self._number, "draft", span.kind
            self._trace.add(Event(*lane, begin, end, {"slots": list(span.slots)}, span.worker))

    def host(self, name: str | None, now: float) -> None:
        """Adds what the host has done since the last call, which ends now; None adds nothing."""
        if name is not None:
            self._trace.add(Event(self._number, "host", name, self._host, now, {}))
        self._host = now


def _most_bytes(event: Event) -> int:
    """Upper bound of an event's bytes in the file."""
    rows = event.args.get("rows", ())
    numbers = len(event.args.get("slots", ())) + sum(
        len(row["tokens"]) + sum(len(of_k) + 1 for of_k in row.get("prepared", ())) for row in rows
    )
    return _EVENT_BYTES + len(rows) * _ROW_BYTES + numbers * _NUMBER_BYTES


def _content(row: RowTrace) -> dict[str, Any]:
    """The row as it is written: without `prepared` where nothing was."""
    content = row._asdict()
    if not row.prepared:
        del content["prepared"]
    return content


def _name(rows: Sequence[RowTrace]) -> str:
    """Name of a round's slice; viewers colour slices by name."""
    if not rows:
        return "discarded"
    sources = [row.source for row in rows if row.source is not None]
    if not sources:
        return "verify" if any(row.L for row in rows) else "forward"
    if len(set(sources)) == 1:
        return f"verify: {sources[0]}"
    return f"verify: {sources.count('hit')} of {len(sources)} hit"


def _metadata(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
