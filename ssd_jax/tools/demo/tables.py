"""The fastest mode in a line, and the table of `demo --full`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from ssd_jax.tools.bench.report import DRAFT_COLUMNS, SPEED_COLUMNS, VariantSummary, identical_cell
from ssd_jax.tools.bench.table import Column, Page, build_table


def fastest_line(rows: Sequence[VariantSummary], dtype: str) -> str:
    """The fastest of these modes, of which the first is ar, with its speed and that of ar."""
    base, *others = rows
    speeds = {
        row.variant: row.decode_tokens_per_second.value
        for row in rows
        if row.decode_tokens_per_second is not None
    }
    ratios = {row.variant: row.ratio.value for row in others if row.ratio is not None}
    if not ratios:
        return "measured here: nothing, no answer has two tokens"
    name = max(ratios, key=lambda variant: ratios[variant])
    gain, plain = f"{ratios[name]:.2f}x of {base.variant}", speeds[base.variant]
    if ratios[name] <= 1:
        runner_up = f"the next is {_describe(name)} with {gain}"
        return f"measured here: {base.variant}, {dtype}: {plain:.1f} tokens/s; {runner_up}"
    speed = f"{speeds[name]:.1f} tokens/s, {gain} ({plain:.1f})"
    return f"measured here: {_describe(name, dtype)}: {speed}"


def speed_table(rows: Sequence[VariantSummary], *, title: str) -> Page:
    """A row for each mode; the others are compared with the first."""
    columns: list[Column[VariantSummary]] = [
        Column("mode", lambda row: Text(row.variant, style="cyan"), "left"),
        *SPEED_COLUMNS,
        *DRAFT_COLUMNS,
        Column("same\ntext", identical_cell),
    ]
    base = rows[0].variant
    ratio = f"; ratio: of tokens/s to those of {base}" * (len(rows) > 1)
    notes = [f"tokens/s: decoding, of all prompts together{ratio}"]
    if any("acceptance_length" in row.metrics for row in rows):
        notes.append("the other figures: medians over the prompts")
    if any("hit_rate" in row.metrics for row in rows):
        notes.append("tokens a round: of ssd fewer where a branch is shorter or nothing is drafted")
    return build_table(columns, rows, title=title, notes=notes)


def _describe(variant: str, dtype: str | None = None) -> str:
    """ "sd k=1" as "sd, K = 1"."""
    mode, _, k = variant.partition(" k=")
    return ", ".join(filter(None, (mode, dtype, k and f"K = {k}")))
