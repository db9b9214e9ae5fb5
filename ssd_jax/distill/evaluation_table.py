"""Figures of a draft as tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.table import Table

from ssd_jax.bench.table import Column, build_table, number_cell

_NAMES = {"greedy": "greedy", "sampled": "T = 1"}


class _Row(NamedTuple):
    name: str
    found: Mapping[str, Any]


class _Predicted(NamedTuple):
    name: str
    of: str
    modes: Mapping[str, Any]


class _Call(NamedTuple):
    name: str
    of: str
    tail: bool
    by_k: Mapping[str, float]


def evaluation_tables(document: Mapping[str, Any]) -> list[Table]:
    """What `evaluate.evaluate` gives: agreement, tokens per call, costs,
    predictions."""
    rows = [_Row(name, found) for name, found in document["sets"].items()]
    rows.append(_Row("mean", document["mean"]))
    return [
        _agreement(document, rows),
        _per_call(rows),
        _costs(document["steps"]),
        _predictions(rows),
    ]


def _agreement(document: Mapping[str, Any], rows: list[_Row]) -> Table:
    columns: list[Column[_Row]] = [
        Column(title="set", cell=lambda row: row.name, justify="left"),
        Column(title="prompts", cell=lambda row: _count(row.found.get("prompts"))),
        Column(
            title="agreement", cell=lambda row: number_cell(row.found["greedy_agreement"], "{:.3f}")
        ),
        Column(title="sum min(p, q)", cell=lambda row: number_cell(row.found["overlap"], "{:.3f}")),
    ]
    return build_table(
        columns,
        rows,
        title=f"draft {document['draft']}",
        notes=["agreement: of greedy text; sum min(p, q): of text at temperature 1"],
    )


def _predictions(rows: list[_Row]) -> Table:
    found = [
        _Predicted(row.name, name, row.found["predicted"][of])
        for row in rows
        for of, name in _NAMES.items()
    ]
    columns: list[Column[_Predicted]] = [
        Column(title="set", cell=lambda row: row.name, justify="left"),
        Column(title="text", cell=lambda row: row.of, justify="left"),
        Column(title="SD / AR", cell=lambda row: f"{row.modes['sd']['speed_up']:.2f}x"),
        Column(title="K", cell=lambda row: str(row.modes["sd"]["k"])),
        Column(title="SSD / AR", cell=lambda row: f"{row.modes['ssd']['speed_up']:.2f}x"),
        Column(title="K", cell=lambda row: str(row.modes["ssd"]["k"])),
        Column(title="M", cell=lambda row: str(row.modes["ssd"]["budget"])),
        Column(title="hits", cell=lambda row: f"{row.modes['ssd']['hit_rate']:.0%}"),
    ]
    return build_table(columns, found, title="fastest K and M that Theorem 7 predicts")


def _per_call(rows: list[_Row]) -> Table:
    calls: list[_Call] = []
    for row in rows:
        per_call = row.found["tokens_per_call"]
        for of, name in _NAMES.items():
            calls.append(_Call(row.name, name, False, per_call[of]))
            calls.append(_Call(row.name, name, True, per_call[f"{of}_all_hits"]))
    columns: list[Column[_Call]] = [
        Column(title="set", cell=lambda call: call.name, justify="left"),
        Column(title="text", cell=lambda call: call.of, justify="left"),
        Column(
            title="rounds", cell=lambda call: "SSD, all hits" if call.tail else "SD", justify="left"
        ),
    ]
    columns += [Column(title=f"K={k}", cell=functools.partial(_tokens, k=k)) for k in calls[0].by_k]
    return build_table(columns, calls, title="tokens per call of the target")


def _tokens(call: _Call, k: str) -> str | None:
    return number_cell(call.by_k[k], "{:.2f}")


def _costs(steps: Mapping[str, Any]) -> Table:
    found = [
        (role, tokens, ratio)
        for role in ("target", "draft")
        for tokens, ratio in steps[role].items()
    ]
    one = steps["draft"]["1"]
    columns: list[Column[tuple[str, str, float]]] = [
        Column(title="forward of", cell=lambda row: row[0], justify="left"),
        Column(title="tokens", cell=lambda row: row[1]),
        Column(title="/ target's of 1", cell=lambda row: f"{row[2]:.3f}x"),
        Column(
            title="draft's of 1 / this",
            cell=lambda row: f"{one / row[2]:.3f}" if row[0] == "target" else None,
        ),
    ]
    title = f"forwards of one text; the target's of 1 token takes {steps['target_ms']:.2f} ms"
    return build_table(columns, found, title=title)


def _count(number: int | None) -> str | None:
    return None if number is None else str(number)
