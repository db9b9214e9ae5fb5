"""The tables of all commands: whole at any width, and without columns that have no value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Generic, Literal, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ssd_jax.tools.bench.stats import Estimate

Row = TypeVar("Row")
_GAP = 2  # between columns: the padding of a cell and the line of the box, which is invisible


@dataclasses.dataclass(frozen=True)
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
) -> Page:
    """A table of the columns that have a value in some row, with a title above and notes below.

    Columns that do not fit side by side follow below, beside the names of the rows again. Names are
    the first column, and those after it as long as they are left-justified.
    """
    filled = [(column, [column.cell(row) for row in rows]) for column in columns]
    visible = [entry for entry in filled if any(cell is not None for cell in entry[1])]
    layout = _Folded([column for column, _ in visible], [list(map(_text, c)) for _, c in visible])
    return Page(title, layout, notes)


class Page:
    """A table with a title above and notes below, for rich; no line of it ends in blanks."""

    # rich would wrap a title and a caption of its own at the width of the table.
    def __init__(self, title: str | None, layout: _Folded, notes: Sequence[str]) -> None:
        self._title, self._folded, self._notes = title, layout, notes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._title:
            yield Text(f"{self._title}\n", style="bold", overflow="fold")
        for table_part in self._folded.parts(options.max_width):
            if table_part is None:
                yield ""
                continue
            for line in console.render_lines(table_part, options, pad=False):
                yield from _strip(line)
                yield Segment.line()
        if self._notes:
            yield Text("\n" + "\n".join(self._notes), style="dim", overflow="fold")


def _strip(line: Sequence[Segment]) -> list[Segment]:
    """A line without the blanks at its end."""
    segments = list(line)
    while segments and not segments[-1].text.strip():
        segments.pop()
    if segments:
        last = segments.pop()
        segments.append(Segment(last.text.rstrip(), last.style, last.control))
    return segments


class _Folded:
    """Columns with their cells, in as many parts as the width needs."""

    def __init__(self, columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> None:
        self._columns, self._cells = columns, cells
        self._widths = []
        for column, texts in zip(columns, cells, strict=True):
            lines = "\n".join([column.title, *(text.plain for text in texts)]).split("\n")
            self._widths.append(max(map(cell_len, lines)))

    def parts(self, width: int) -> Iterator[Table | None]:
        """The parts that fit into this width; None is an empty line between two of them."""
        names = len(list(takewhile(lambda column: column.justify == "left", self._columns))) or 1
        parts = [list(range(names))]
        for index in range(names, len(self._columns)):
            width_needed = sum(self._widths[i] + _GAP for i in [*parts[-1], index]) - _GAP
            if width_needed > width and len(parts[-1]) > names:
                parts.append([*range(names)])
            parts[-1].append(index)
        for number, table_part in enumerate(parts):
            if number:
                yield None
            yield self._part(table_part)

    def _part(self, indices: Sequence[int]) -> Table:
        table = Table(
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="bold",
        )
        for index in indices:
            column = self._columns[index]
            table.add_column(
                column.title,
                justify=column.justify,
                no_wrap=column.justify == "right",
                overflow="fold",
            )
        for row in zip(*(self._cells[index] for index in indices), strict=True):
            table.add_row(*row)
        return table


def estimate_cell(estimate: Estimate | None, form: str) -> Text | None:
    """The median in a format such as "{:.1f}", and its interval on a second line, if any."""
    if estimate is None:
        return None
    text, ends = Text(form.format(estimate.value)), interval(estimate, form.rstrip("x"))
    return text if ends is None else text.append(f"\n{ends}", style="dim")


def interval(estimate: Estimate, form: str) -> str | None:
    """The ends of an estimate's interval; None where there is none."""
    if estimate.low is None or estimate.high is None:
        return None
    return f"{form.format(estimate.low)}-{form.format(estimate.high)}"


def number_cell(value: float | None, form: str) -> str | None:
    """A formatted number; None stays None."""
    return None if value is None else form.format(value)


def median_cell(estimate: Estimate | None, form: str) -> str | None:
    """The median in a format, without its interval."""
    return number_cell(estimate and estimate.value, form)


def pluralize(count: int, noun: str) -> str:
    """ "1 prompt", "2 prompts"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _text(cell: str | Text | None) -> Text:
    if cell is None:
        return Text("-", style="dim")
    return cell if isinstance(cell, Text) else Text(cell)
