"""Figures of a draft as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.table import Table

from ssd_jax.bench.table import Column, build_table, number_cell

_TEXTS = {"greedy": "greedy", "sampled": "T = 1"}
_NAMES = ("set", "text", "rounds", "forward of")
"""Titles of columns of words."""


def evaluation_tables(document: Mapping[str, Any]) -> list[Table]:
    """What `evaluate.evaluate` gives: agreement, tokens per call, costs, predictions."""
    sets = {**document["sets"], "mean": document["mean"]}
    agreement = [
        (
            name,
            str(found["prompts"]) if "prompts" in found else None,
            number_cell(found["greedy_agreement"], "{:.3f}"),
            number_cell(found["overlap"], "{:.3f}"),
        )
        for name, found in sets.items()
    ]
    calls = [
        (name, text, rounds, *(number_cell(x, "{:.2f}") for x in by_k.values()))
        for name, found in sets.items()
        for of, text in _TEXTS.items()
        for rounds, by_k in (
            ("SD", found["tokens_per_call"][of]),
            ("SSD, all hits", found["tokens_per_call"][f"{of}_all_hits"]),
        )
    ]
    ks = document["mean"]["tokens_per_call"]["greedy"]
    steps = document["steps"]
    one = steps["draft"]["1"]
    costs = [
        (role, tokens, f"{ratio:.3f}x", f"{one / ratio:.3f}" if role == "target" else None)
        for role in ("target", "draft")
        for tokens, ratio in steps[role].items()
    ]
    predicted = [
        (name, text, *_prediction(found["predicted"][of]))
        for name, found in sets.items()
        for of, text in _TEXTS.items()
    ]
    return [
        _table(
            f"draft {document['draft']}",
            ("set", "prompts", "agreement", "sum min(p, q)"),
            agreement,
            notes=["agreement: of greedy text; sum min(p, q): of text at temperature 1"],
        ),
        _table(
            "tokens per call of the target",
            ("set", "text", "rounds", *(f"K={k}" for k in ks)),
            calls,
        ),
        _table(
            f"forwards of one text; the target's of 1 token takes {steps['target_ms']:.2f} ms",
            ("forward of", "tokens", "/ target's of 1", "draft's of 1 / this"),
            costs,
        ),
        _table(
            "fastest K and M that Theorem 7 predicts",
            ("set", "text", "SD / AR", "K", "SSD / AR", "K", "M", "hits"),
            predicted,
        ),
    ]


def _prediction(modes: Mapping[str, Any]) -> tuple[str, ...]:
    sd, ssd = modes["sd"], modes["ssd"]
    speeds = f"{sd['speed_up']:.2f}x", f"{ssd['speed_up']:.2f}x"
    budget, hits = str(ssd["budget"]), f"{ssd['hit_rate']:.0%}"
    return speeds[0], str(sd["k"]), speeds[1], str(ssd["k"]), budget, hits


def _table(
    title: str,
    names: Sequence[str],
    rows: Sequence[tuple[str | None, ...]],
    notes: Sequence[str] = (),
) -> Table:
    columns: list[Column[tuple[str | None, ...]]] = [
        Column(title=name, cell=itemgetter(i), justify="left" if name in _NAMES else "right")
        for i, name in enumerate(names)
    ]
    return build_table(columns, rows, title=title, notes=notes)
