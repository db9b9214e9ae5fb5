"""What the rounds of an engine have done, counted and with the last ones, for other threads to see.

Only committed tokens count, as in the metrics of requests, but as rounds come and not when texts
end.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from ssd_jax.engine.requests.metrics import RoundRecord
from ssd_jax.roles.activity import Busy

_ROUNDS, _DRAFTED = 64, 512
"""Most of the target's and of the draft's spans that are kept."""


class TargetSpan(NamedTuple):
    """A program of the target.

    Attributes:
      begin, end: from its dispatch until its outcome was read; seconds of the engine's clock.
      prompt: tokens of the prompt that it finished; 0 in a round.
      rows, tokens: requests, and tokens committed.
      proposed, accepted: tokens of the draft that it verified, and those of them that counted.
      hits, lookups: prepared branches that were the right ones, of those that were looked for.
      misses: causes of the other look-ups.
      mode: ar, where rounds did without the draft, sd or ssd.
    """

    begin: float
    end: float
    prompt: int = 0
    rows: int = 1
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    hits: int = 0
    lookups: int = 0
    misses: tuple[str, ...] = ()
    mode: str = "ar"


@dataclasses.dataclass(kw_only=True)
class RoundCounts:
    """Sums over all rounds of an engine, or of several.

    Attributes:
      rounds: number of rounds, by mode.
      batches: number of rounds, by the slots that they ran, as far as that is known.
      tokens: committed by rounds and at the ends of prompts.
      drafts: proposals that were verified.
      draft_tokens, accepted: their tokens, and those that were accepted.
      accepted_at: the latter by place in the proposal.
      hits: look-ups that found their branch.
      misses: the other look-ups, by cause.
      draft_seconds, hidden_seconds: work of a draft with devices of its own, and the part of it
        during which the target was busy.
    """

    rounds: Counter[str] = dataclasses.field(default_factory=Counter)
    batches: Counter[int] = dataclasses.field(default_factory=Counter)
    tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: Counter[int] = dataclasses.field(default_factory=Counter)
    hits: int = 0
    misses: Counter[str] = dataclasses.field(default_factory=Counter)
    draft_seconds: float = 0.0
    hidden_seconds: float = 0.0

    def add(self, other: RoundCounts) -> None:
        """Adds the sums of another engine."""
        for field in dataclasses.fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)


class RoundView(NamedTuple):
    """What a monitor had seen at one time; times in seconds of the engine's clock."""

    counts: RoundCounts
    target: Sequence[TargetSpan]
    draft: Sequence[Busy]


class RoundMonitor:
    """Counts rounds and remembers the last ones. Any thread may ask for a view."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for moments
        self._counts = RoundCounts()
        self._target: deque[TargetSpan] = deque(maxlen=_ROUNDS)
        self._draft: deque[Busy] = deque(maxlen=_DRAFTED)

    def prefill(self, span: tuple[float, float], prompt: int, tokens: int) -> None:
        """Takes the end of a prompt, with the tokens that came with it."""
        with self._lock:
            self._counts.tokens += tokens
            self._target.append(TargetSpan(*span, prompt=prompt, tokens=tokens))

    def round(self, span: tuple[float, float], records: Sequence[RoundRecord], mode: str) -> None:
        """Takes a round, with what its rows have committed; none of those that count no more.

        Where the draft was out of reach of all of them, it did without the draft.
        """
        tokens = drafts = proposed = accepted = hits = 0
        misses: list[str] = []
        with self._lock:
            counts = self._counts
            for record in records:
                tokens += record.committed
                if record.proposed:
                    drafts += 1
                    proposed += record.proposed
                    accepted += record.accepted
                    for place in range(record.accepted):
                        counts.accepted_at[place] += 1
                if record.source == "hit":
                    hits += 1
                elif record.source is not None:
                    misses.append(record.source)
                    counts.misses[record.source] += 1
            if misses and {*misses} == {"dead"} and not hits and not proposed:
                mode = "ar"
            counts.rounds[mode] += 1
            counts.batches.update({record.batch for record in records if record.batch})
            counts.tokens += tokens
            counts.drafts += drafts
            counts.draft_tokens += proposed
            counts.accepted += accepted
            counts.hits += hits
            lookups = hits + len(misses)
            facts = len(records), tokens, proposed, accepted, hits, lookups
            self._target.append(TargetSpan(*span, 0, *facts, (*{*misses},), mode))

    def draft(self, spans: Sequence[Busy], hidden: float) -> None:
        """Takes work that a draft has reported, and the seconds of it that the target hid."""
        with self._lock:
            self._counts.draft_seconds += sum(span.end - span.begin for span in spans)
            self._counts.hidden_seconds += hidden
            self._draft.extend(spans)

    def view(self) -> RoundView:
        """What it has seen by now."""
        with self._lock:
            counts = RoundCounts()
            counts.add(self._counts)
            return RoundView(counts, [*self._target], [*self._draft])
