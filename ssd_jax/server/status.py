"""The status page, and the figures that it shows."""

from __future__ import annotations

import importlib.resources
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ssd_jax import __version__
from ssd_jax.engine.rounds.monitor import TargetSpan
from ssd_jax.roles.activity import FORWARDS, Busy
from ssd_jax.server.activity import EngineActivity
from ssd_jax.server.state import ServerState
from ssd_jax.system.host_memory import memory_limit

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; connect-src 'self'",
    "Cache-Control": "no-cache",
}
"""Of the page: it loads nothing from elsewhere."""
_SHOWN = 16  # most programs of the target in the timeline
_GAP = 8  # a time without any, in durations of a program, behind which the timeline begins


def page() -> str:
    """The page, which asks for `figures` by itself."""
    file = importlib.resources.files("ssd_jax.server").joinpath("status_page.html")
    return file.read_text(encoding="utf-8")


def figures(state: ServerState) -> dict[str, Any]:
    """What the page shows now.

    Shares are of 1, memory in bytes, the timeline in milliseconds before now.
    """
    activity, admission = state.engine.activity(), state.admission
    reason = activity.why_not_speculating
    return {
        "model": state.model,
        "version": __version__,
        "uptime": round(time.time() - state.created),
        "why_not_ready": state.why_not_ready,
        "mode": activity.mode,
        "ran": activity.ran,
        "speculating": reason is None,
        "why_not_speculating": reason,
        "slots": admission.slots,
        "running": activity.running,
        "queue": admission.queue,
        "waiting": max(admission.texts - activity.running, 0),
        "tokens": activity.counts.tokens,
        "rounds": dict(activity.counts.rounds),
        "hit_rate": activity.hit_rate,
        "acceptance_length": activity.acceptance_length,
        "hidden_draft_share": activity.hidden_draft_share,
        "fallbacks": dict(activity.counts.misses),
        "memory": _memory(activity),
        "timeline": timeline(activity),
    }


def timeline(activity: EngineActivity) -> dict[str, Any]:
    """The last programs of the target that followed each other, and the draft's work beside them.

    Each is (begin, end, kind, text).
    """
    target = _together(activity.target)
    if not target:
        return {"target": [], "draft": []}
    begin = target[0].begin

    def place(span: TargetSpan | Busy) -> tuple[float, float]:
        return round(1e3 * (span.begin - activity.now), 3), round(
            1e3 * (span.end - activity.now), 3
        )

    return {
        "target": [(*place(span), _kind(span), _text(span)) for span in target],
        "draft": [
            (*place(span), "forward" if span.kind in FORWARDS else "other", span.kind, span.worker)
            for span in activity.draft
            if span.end > begin
        ],
    }


def _together(spans: Sequence[TargetSpan]) -> Sequence[TargetSpan]:
    """The last spans, without those before a long time in which nothing happened."""
    last = spans[-_SHOWN:]
    if not last:
        return []
    longest = _GAP * statistics.median(span.end - span.begin for span in last)
    begin = 0
    for place, (before, span) in enumerate(pairwise(last), start=1):
        if span.begin - before.end > longest:
            begin = place
    return last[begin:]


def _kind(span: TargetSpan) -> str:
    if span.prompt:
        return "prompt"
    if span.lookups:
        return "hit" if span.hits == span.lookups else "miss" if not span.hits else "mixed"
    return "verify" if span.proposed else "plain"


def _text(span: TargetSpan) -> str:
    if span.prompt:
        return f"the end of a prompt of {span.prompt} tokens"
    texts = f"{span.rows} text" + "s" * (span.rows != 1)
    if not span.proposed:
        return f"{texts}, {span.tokens} tokens, nothing proposed"
    hits = f", {span.hits} of {span.lookups} branches were prepared" if span.lookups else ""
    accepted = f"{span.accepted} of {span.proposed} proposed tokens accepted"
    return f"{texts}, {span.tokens} tokens, {accepted}{hits}"


def _memory(activity: EngineActivity) -> dict[str, Any]:
    """Bytes of this process and of its accelerators, and pages of keys and values."""
    limit, _ = memory_limit()
    jax = sys.modules.get("jax")
    devices = []
    if jax is not None and activity.mode is not None:
        memories = [(device, device.memory_stats()) for device in jax.local_devices()]
        devices = [
            {
                "name": f"{device.device_kind} {device.id}",
                "used": memory.get("bytes_in_use", 0),
                "limit": memory.get("bytes_limit"),
            }
            for device, memory in memories
            if memory
        ]
    return {
        "process": _resident(),
        "limit": limit,
        "devices": devices,
        "used_pages": activity.used_pages,
        "pages": activity.pages,
    }


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
