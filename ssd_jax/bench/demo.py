"""The short speed table at the end of the demo."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ssd_jax.bench.table import Column, build_table, number_cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One mode's figures; None where one does not apply, and its column goes if all are None.

    Attributes:
      mode: such as "ar", with whatever else tells rows apart.
      tokens_per_second: decoding alone.
      ratio: of tokens per second against the first mode.
      first_token_ms: from the request to the first token.
      acceptance_length: tokens committed per target forward, bonus included.
      hit_rate: hits / rounds with a look-up.
      hidden_draft_share: share of the draft's time that ran beside the target.
      identical: whether the ids equal the first mode's.
    """

    mode: str
    tokens_per_second: float | None = None
    ratio: float | None = None
    first_token_ms: float | None = None
    acceptance_length: float | None = None
    hit_rate: float | None = None
    hidden_draft_share: float | None = None
    identical: bool | None = None


def summary_table(
    rows: Sequence[SpeedRow], *, title: str | None = None, notes: Sequence[str] = ()
) -> Table:
    """A table of modes, one a row, with notes below."""
    return build_table(_COLUMNS, rows, title=title, notes=notes)


def draft_cost(metrics: Mapping[str, Any], k: int, branches: int) -> str | None:
    """What a draft on devices of its own costs beside the target, in words; None if unknown.

    Args:
      metrics: of an SSD run.
      k, branches: K and M.
    """
    step, verify = metrics["step_ms"], metrics["verify_ms"]
    if not step or not verify:
        return None
    fits = "which hides them" if k * step <= verify else "so it waits for its draft"
    return (
        f"a round has {k} draft forwards of {branches} branches, {step:.0f} ms each;\n"
        f"the target verifies in {verify:.0f} ms, {fits}"
    )


def _identical(row: SpeedRow) -> Text | None:
    if row.identical is None:
        return None
    return Text("yes", style="green") if row.identical else Text("no", style="red")


_COLUMNS: tuple[Column[SpeedRow], ...] = (
    Column(title="mode", cell=lambda row: Text(row.mode, style="cyan"), justify="left"),
    Column(title="tokens\n/s", cell=lambda row: number_cell(row.tokens_per_second, "{:.1f}")),
    Column(title="ratio", cell=lambda row: number_cell(row.ratio, "{:.2f}x")),
    Column(title="first\ntoken\nms", cell=lambda row: number_cell(row.first_token_ms, "{:.0f}")),
    Column(title="accepted\nlength", cell=lambda row: number_cell(row.acceptance_length, "{:.2f}")),
    Column(title="hit\nrate", cell=lambda row: number_cell(row.hit_rate, "{:.2f}")),
    Column(title="hidden\ndraft", cell=lambda row: number_cell(row.hidden_draft_share, "{:.2f}")),
    Column(title="identical", cell=_identical),
)
