"""Tables that show a column only where some row has a value for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, Literal, TypeVar

from rich import box
from rich.table import Table
from rich.text import Text

from ssd_jax.bench.stats import Estimate

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """A column: its title, and what a row shows in it (None: nothing)."""

    title: str
    cell: Callable[[Row], str | Text | None]
    justify: Literal["left", "right"] = "right"


def build_table(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    *,
    title: str | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """A table of the columns that have a value in some row.

    Where space is short the left-justified columns are wrapped.

    Args:
      columns: in order.
      rows: what the columns' cells are called with.
      title: a line above.
      notes: lines below.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    cells = [[column.cell(row) for row in rows] for column in columns]
    shown = [i for i, found in enumerate(cells) if any(cell is not None for cell in found)]
    for i in shown:
        justify = columns[i].justify
        table.add_column(
            columns[i].title, justify=justify, no_wrap=justify == "right", overflow="fold"
        )
    for number in range(len(rows)):
        table.add_row(*(_cell(cells[i][number]) for i in shown))
    page = Table.grid()  # rich would wrap a title and a caption at the width of the table
    if title:
        page.add_row(Text(f"{title}\n", style="bold"))
    page.add_row(table)
    if notes:
        page.add_row(Text("\n" + "\n".join(notes), style="dim"))
    return page


def estimate_cell(estimate: Estimate | None, form: str) -> Text | None:
    """The median, and its interval on a second line where there is one.

    Args:
      estimate: what to show.
      form: a format such as "{:.1f}".
    """
    if estimate is None:
        return None
    text = Text(form.format(estimate.median))
    if estimate.low is not None and estimate.high is not None:
        low, high = (form.format(value).rstrip("x") for value in (estimate.low, estimate.high))
        text.append(f"\n{low}-{high}", style="dim")
    return text


def number_cell(value: float | None, form: str) -> str | None:
    """A formatted number; None stays None."""
    return None if value is None else form.format(value)


def _cell(cell: str | Text | None) -> Text:
    if cell is None:
        return Text("-", style="dim")
    return cell if isinstance(cell, Text) else Text(cell)
