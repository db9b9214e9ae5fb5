"""What the engines of a server do, as metrics and the status page show it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.rounds.monitor import RoundCounts, TargetSpan
from ssd_jax.roles.activity import Busy

_LAST = 20  # rounds that show whether the server speculates


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineActivity:
    """All engines of a model together.

    Attributes:
      mode: the mode that the server decodes in; None while the model loads.
      chooses: whether mode auto may do without the draft.
      counts: sums over all rounds.
      running: texts in slots.
      used_pages, pages: of keys and values: those that texts hold, and all; 0 where each slot has
        its own.
      target, draft: the last spans of both, in order.
      now: the clock of these spans, in seconds.
    """

    mode: str | None
    chooses: bool = False
    counts: RoundCounts = dataclasses.field(default_factory=RoundCounts)
    running: int = 0
    used_pages: int = 0
    pages: int = 0
    target: Sequence[TargetSpan] = ()
    draft: Sequence[Busy] = ()
    now: float = 0.0

    @property
    def rounds(self) -> list[TargetSpan]:
        """The last rounds, without prompts."""
        return [span for span in self.target if not span.prompt and span.rows]

    @property
    def ran(self) -> str | None:
        """The mode of the last round that verified a proposal, lately, or of the last one; None
        without any."""
        last = self.rounds[-_LAST:]
        verified = [span for span in last if span.proposed]
        return (verified or last)[-1].mode if last else None

    @property
    def why_not_speculating(self) -> str | None:
        """Why the last rounds verified no tokens of a draft; None if they did."""
        if self.mode is None:
            return "the model is loading"
        last = self.rounds[-_LAST:]
        if any(span.proposed for span in last):
            return None
        if self.mode == "ar":
            return "mode ar has no draft"
        if not last:
            return "nothing was decoded yet"
        misses = {cause for span in last for cause in span.misses}
        if "dead" in misses:
            return "the draft worker is out of reach"
        if misses:
            return f"no proposal came in time ({', '.join(sorted(misses))})"
        if self.chooses:
            return "mode auto finds it faster without the draft, or requests ask for no draft"
        return "requests ask for no draft"

    @property
    def hit_rate(self) -> float | None:
        """Of the look-ups of the last rounds; None without any."""
        return _share(
            sum(span.hits for span in self.rounds), sum(span.lookups for span in self.rounds)
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a row of the last rounds committed; None without a round."""
        return _share(
            sum(span.tokens for span in self.rounds), sum(span.rows for span in self.rounds)
        )

    @property
    def hidden_draft_share(self) -> float | None:
        """The part of all the draft's work that the target hid; None without any."""
        return _share(self.counts.hidden_seconds, self.counts.draft_seconds)


def activity_of(engines: Iterable[Engine], mode: str, *, chooses: bool) -> EngineActivity:
    """What these engines have done by now."""
    counts, target, draft = RoundCounts(), list[TargetSpan](), list[Busy]()
    running = used = pages = 0
    for engine in engines:
        view, load = engine.monitor.view(), engine.load
        counts.add(view.counts)
        target += view.target
        draft += view.draft
        running, used, pages = running + load.running, used + load.used_pages, pages + load.pages
    return EngineActivity(
        mode=mode,
        chooses=chooses,
        counts=counts,
        running=running,
        used_pages=used,
        pages=pages,
        target=sorted(target),
        draft=sorted(draft, key=lambda span: span.begin),
        now=time.perf_counter(),
    )


def _share(part: float, total: float) -> float | None:
    return part / total if total else None
