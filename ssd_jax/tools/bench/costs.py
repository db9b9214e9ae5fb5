"""The cost of a decode step by its parts: drafting and verifying.

In decoding, drafting and verifying are dispatched without waiting. Here they are timed one after
the other, which gives the ceiling of hiding the draft: 1 + t, where t = t_draft / t_verify (paper,
Corollary 9), or (1 + t) / t where the draft takes longer than what could hide it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rich.text import Text

from ssd_jax.tools.bench.stats import Estimate, estimate_of
from ssd_jax.tools.bench.step import in_turns
from ssd_jax.tools.bench.table import Column, Page, build_table, estimate_cell, number_cell

_WARM_UP, _ROUNDS = 2, 12
"""Rounds of warm-up, and rounds that count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Medians over rounds, in milliseconds.

    Attributes:
      draft_ms: from the request for proposals until they are ready.
      verify_ms: from dispatch until the outcome is ready.
      gain: measured speed-up of SSD with the same K over SD in decoding.
      ceiling: speed-up over SD if drafting ran beside verification and nothing else changed.
    """

    draft_ms: Estimate
    verify_ms: Estimate
    gain: Estimate | None = None
    ceiling: float


def time_round(draft: Callable[[], object], verify: Callable[[], object]) -> RoundCosts:
    """Times proposals and verifications in turn, see `in_turns`."""
    times = in_turns((draft, verify), rounds=_WARM_UP + _ROUNDS)
    draft_ms, verify_ms = (estimate_of(ms[_WARM_UP:]) for ms in times)
    ratio = draft_ms.value / verify_ms.value
    ceiling = (1 + ratio) / max(1, ratio)
    return RoundCosts(draft_ms=draft_ms, verify_ms=verify_ms, ceiling=ceiling)


def costs_table(costs: Mapping[str, RoundCosts]) -> Page:
    """A line a variant: the parts of a round, and what hiding the draft would reach."""
    columns: list[Column[tuple[str, RoundCosts]]] = [
        Column("variant", lambda row: Text(row[0], style="cyan"), "left"),
        Column("draft ms", lambda row: estimate_cell(row[1].draft_ms, "{:.1f}")),
        Column("verify ms", lambda row: estimate_cell(row[1].verify_ms, "{:.1f}")),
        Column("ceiling", lambda row: number_cell(row[1].ceiling, "{:.2f}x")),
        Column("ssd / sd", lambda row: estimate_cell(row[1].gain, "{:.2f}x")),
    ]
    notes = ["ceiling: (draft + verify) / the longer one, what running them at once would gain"]
    if any(entry.gain is not None for entry in costs.values()):
        notes.append("ssd / sd: what SSD gained in tokens/s, hits, misses and waits included")
    return build_table(columns, list(costs.items()), title="a round by its parts", notes=notes)
