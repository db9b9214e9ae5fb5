"""The lanes of a trace file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.config.settings import MAX_WORKERS
from ssd_jax.engine.rounds.trace import FORMAT, LANES, MAX_BYTES, OF_A_WORKER, PRODUCER
from ssd_jax.errors import InputError
from ssd_jax.roles.activity import overlap
from ssd_jax.system.files import read_json, shown


class Slice(NamedTuple):
    """A span of work; times are in milliseconds."""

    name: str
    begin: float
    end: float
    args: Mapping[str, Any]

    @property
    def sources(self) -> list[str]:
        """Of a round: "hit" or the cause of a fallback, for each row with a look-up."""
        return [row["source"] for row in self.args.get("rows", ()) if row["source"] is not None]

    @property
    def committed(self) -> int:
        """Of a round: number of tokens of all rows."""
        return sum(len(row["tokens"]) for row in self.args.get("rows", ()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLanes:
    """The lanes of one engine.

    Attributes:
      name: such as "ssd k=4".
      target: prefills and rounds, by time.
      drafts: the work of each draft worker, by time; none where it has no devices of its own.
    """

    name: str
    target: Sequence[Slice]
    drafts: Sequence[Sequence[Slice]]

    @property
    def rounds(self) -> list[Slice]:
        """The target's slices that are not prefills."""
        return [slice_ for slice_ in self.target if "round" in slice_.args]

    def hidden_share(self, begin: float = -math.inf, end: float = math.inf) -> float | None:
        """Share of draft time beside target time, between two times; None without draft time."""
        target = [(slice_.begin, slice_.end) for slice_ in self.target]
        spans = [(max(s.begin, begin), min(s.end, end)) for slice_ in self.drafts for s in slice_]
        spans = [(first, last) for first, last in spans if first < last]
        busy = sum(last - first for first, last in spans)
        return sum(overlap(*span, target) for span in spans) / busy if busy else None


def read_trace(path: Path) -> list[EngineLanes]:
    """The engines of a file that `--trace` wrote.

    Raises:
      InputError: unreadable, no JSON, another program's trace, or damaged.
    """
    document = read_json(path, max_bytes=MAX_BYTES, remedy="give a file that --trace wrote")
    if not isinstance(document.get("traceEvents"), list):
        raise InputError(f"{path} has no traceEvents; give a file that --trace wrote")
    metadata = document.get("otherData")
    if not isinstance(metadata, dict) or metadata.get("producer") != PRODUCER:
        raise InputError(f"{path} is another program's trace; give a file that --trace wrote")
    if metadata.get("format") != FORMAT:
        raise InputError(
            f"{path} has format {shown(metadata.get('format'))}, this version reads {FORMAT}; "
            "trace again"
        )
    try:
        return _engines(document["traceEvents"])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{path} is damaged: {shown(error)}; trace again") from None


def _engines(events: Sequence[Mapping[str, Any]]) -> list[EngineLanes]:
    names: dict[int, str] = {}
    lanes: dict[tuple[int, str], dict[int, list[Slice]]] = {}
    lane_of = {thread: lane for lane, thread in LANES.items()}
    for event in events:
        if event["ph"] != "M":
            worker, thread = divmod(event["tid"], OF_A_WORKER)
            if not 0 <= worker < MAX_WORKERS:
                raise ValueError(f"a slice of draft worker {worker}")
            of_workers = lanes.setdefault((event["pid"], lane_of[thread]), {})
            of_workers.setdefault(worker, []).append(_slice(event))
        elif event["name"] == "process_name":
            names[event["pid"]] = str(event["args"]["name"])

    def by_time(engine: int, lane: str) -> list[list[Slice]]:
        of_workers = lanes.get((engine, lane), {})
        workers = range(1 + max(of_workers, default=-1))  # one may have done nothing
        return [sorted(of_workers.get(n, []), key=lambda slice_: slice_.begin) for n in workers]

    return [
        EngineLanes(
            name=name,
            target=next(iter(by_time(engine, "target")), []),
            drafts=by_time(engine, "draft"),
        )
        for engine, name in names.items()
    ]


def _slice(event: Mapping[str, Any]) -> Slice:
    begin, lasts = float(event["ts"]), float(event["dur"])
    if not (math.isfinite(begin) and 0 <= lasts < math.inf):
        raise ValueError(f"a slice at {begin} that lasts {lasts}")
    slice_ = Slice(str(event["name"]), begin / 1e3, (begin + lasts) / 1e3, dict(event["args"]))
    for row in slice_.args.get("rows", ()):
        _ = row["source"], len(row["tokens"])  # which the properties need
    return slice_
