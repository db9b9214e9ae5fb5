"""Tables are whole at any width, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from ssd_jax.tools.bench.table import Column, build_table


def rendered(table, width, *, terminal=False):
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()


NAMES = ["ar", "ssd k=auto, all cores"]
WIDE = [
    Column("variant", str, "left"),
    *(Column(f"figure {n}", lambda row, n=n: f"{n}.{len(row):05}") for n in range(12)),
]


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_no_figure_and_no_name_is_cut_at_any_width(width, terminal):
    lines = rendered(
        build_table(WIDE, NAMES, title="t", notes=["n " * 60]), width, terminal=terminal
    )
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for n in range(12):
        assert text.count(f"figure {n}\n") + text.count(f"figure {n} ") == 1
        assert {f"{n}.00002", f"{n}.00021"} <= {*text.split()}
    assert text.count("variant") == text.count(NAMES[1])
    assert (text.count("variant") == 1) == (width == 200)
    assert "\u2026" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_no_line_ends_in_blanks(terminal):
    lines = rendered(build_table(WIDE, NAMES, title="t", notes=["n"]), 60, terminal=terminal)
    assert lines == [line.rstrip() for line in lines]


def test_a_table_that_fits_stays_in_one_part():
    lines = rendered(build_table(WIDE[:5], NAMES), 80)
    assert len(lines) == 2 + len(NAMES)
    assert lines[0].split() == ["variant", *(w for n in range(4) for w in ("figure", str(n)))]


def test_the_first_column_names_the_rows_even_where_it_is_a_number():
    columns = [
        Column("prompt", lambda row: f"{row}"),
        *(Column(name, lambda row: "x" * 30, "left") for name in ("one", "two", "three")),
    ]
    lines = rendered(build_table(columns, [3, 4]), 80)
    assert [line.split() for line in lines if "prompt" in line] == [
        ["prompt", "one", "two"],
        ["prompt", "three"],
    ]


def test_a_text_wider_than_the_page_goes_on_in_the_next_line():
    columns = [Column("name", str, "left"), Column("text", lambda _: Text("w " * 70), "left")]
    lines = rendered(build_table(columns, ["row"]), 80)
    assert " ".join(lines).split().count("w") == 70
    assert max(map(len, lines)) <= 80


def test_columns_without_a_value_are_left_out():
    columns = [Column("name", str, "left"), Column("none", lambda _: None), *WIDE[1:2]]
    assert "none" not in "\n".join(rendered(build_table(columns, NAMES), 80))
    some = [Column("name", str, "left"), Column("some", lambda row: None if row == "ar" else "1")]
    assert rendered(build_table(some, NAMES), 80)[2].split() == ["ar", "-"]
