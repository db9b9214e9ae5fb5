"""Figures of a draft as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.table import Table

from ssd_jax.bench.table import Column, build_table, number_cell

_NAMES = {"greedy": "greedy", "sampled": "T = 1"}


class _Row(NamedTuple):
    name: str
    found: Mapping[str, Any]


class _Call(NamedTuple):
    name: str
    of: str
    tail: bool
    by_k: Mapping[str, float]


def evaluation_tables(document: Mapping[str, Any]) -> list[Table]:
    """What `evaluate.evaluate` gives: agreement and predictions, tokens per call, costs."""
    rows = [_Row(name, found) for name, found in document["sets"].items()]
    rows.append(_Row("mean", document["mean"]))
    return [_agreement(document, rows), _per_call(rows), _costs(document["steps"])]


def _agreement(document: Mapping[str, Any], rows: list[_Row]) -> Table:
    columns: list[Column[_Row]] = [
        Column(title="set", cell=lambda row: row.name, justify="left"),
        Column(title="prompts", cell=lambda row: _count(row.found.get("prompts"))),
        Column(
            title="agreement", cell=lambda row: number_cell(row.found["greedy_agreement"], "{:.3f}")
        ),
        Column(title="sum min(p, q)", cell=lambda row: number_cell(row.found["overlap"], "{:.3f}")),
    ]
    for of, name in _NAMES.items():
        columns += [
            Column(title=f"{name} SD", cell=lambda row, of=of: _sd(row.found["predicted"][of])),
            Column(title=f"{name} SSD", cell=lambda row, of=of: _ssd(row.found["predicted"][of])),
        ]
    notes = [
        "agreement: greedy text; sum min(p, q): text at temperature 1",
        "SD and SSD: best K (and M), and how many times as fast as AR, by Theorem 7",
    ]
    return build_table(columns, rows, title=f"draft {document['draft']}", notes=notes)


def _per_call(rows: list[_Row]) -> Table:
    calls = [
        _Call(
            row.name, name, tail, row.found["tokens_per_call"][of + ("_all_hits" if tail else "")]
        )
        for row in rows
        for of, name in _NAMES.items()
        for tail in (False, True)
    ]
    columns: list[Column[_Call]] = [
        Column(title="set", cell=lambda call: call.name, justify="left"),
        Column(title="text", cell=lambda call: call.of, justify="left"),
        Column(
            title="rounds", cell=lambda call: "SSD, all hits" if call.tail else "SD", justify="left"
        ),
    ]
    columns += [
        Column(title=f"K = {k}", cell=lambda call, k=k: number_cell(call.by_k[k], "{:.2f}"))
        for k in calls[0].by_k
    ]
    return build_table(columns, calls, title="tokens per call of the target")


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


def _sd(predicted: Mapping[str, Any]) -> str:
    best = predicted["sd"]
    return f"{best['speed_up']:.2f}x K = {best['k']}"


def _ssd(predicted: Mapping[str, Any]) -> str:
    best = predicted["ssd"]
    return f"{best['speed_up']:.2f}x K = {best['k']}, M = {best['budget']}"


def _count(number: int | None) -> str | None:
    return None if number is None else str(number)
