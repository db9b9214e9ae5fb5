"""The short speed table at the end of the demo."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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


def summary_table(rows: Sequence[SpeedRow], *, title: str | None = None) -> Table:
    """A table of modes, one a row."""
    return build_table(_COLUMNS, rows, title=title)


def _identical(row: SpeedRow) -> Text | None:
    if row.identical is None:
        return None
    return Text("yes", style="green") if row.identical else Text("no", style="red")


_COLUMNS: tuple[Column[SpeedRow], ...] = (
    Column(title="mode", cell=lambda row: Text(row.mode, style="cyan"), justify="left"),
    Column(title="tokens/s", cell=lambda row: number_cell(row.tokens_per_second, "{:.1f}")),
    Column(title="ratio", cell=lambda row: number_cell(row.ratio, "{:.2f}x")),
    Column(title="first token ms", cell=lambda row: number_cell(row.first_token_ms, "{:.0f}")),
    Column(title="accepted length", cell=lambda row: number_cell(row.acceptance_length, "{:.2f}")),
    Column(title="hit rate", cell=lambda row: number_cell(row.hit_rate, "{:.2f}")),
    Column(title="hidden draft", cell=lambda row: number_cell(row.hidden_draft_share, "{:.2f}")),
    Column(title="identical", cell=_identical),
)
