"""Figures of a draft as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from ssd_jax.tools.bench.table import Column, Page, build_table

_TEXTS = {"greedy": "greedy", "sampled": "T = 1"}
_NAMES = ("set", "kind", "text", "rounds", "forward of")
"""Titles of columns of words."""


def evaluation_tables(document: Mapping[str, Any]) -> list[Page]:
    """Tables of what `evaluate.evaluate` returns.

    Agreement, tokens per call, both by kind of prompt where there are kinds, costs, predictions.
    """
    sets = {**document["sets"], "mean": document["mean"]}
    texts = [
        (name, temperature, figures) for name, figures in sets.items() for temperature in _TEXTS
    ]
    agreement = [
        (
            name,
            figures.get("prompts"),
            f"{figures['greedy_agreement']:.3f}",
            f"{figures['overlap']:.3f}",
        )
        for name, figures in sets.items()
    ]
    calls = [
        (name, _TEXTS[temperature], rounds, *_calls(figures["tokens_per_call"][key]))
        for name, temperature, figures in texts
        for rounds, key in (("SD", temperature), ("SSD, all hits", f"{temperature}_all_hits"))
    ]
    steps = document["steps"]
    draft_forward = steps["draft"]["1"]
    costs = [
        (
            role,
            tokens,
            f"{ratio:.3f}x",
            f"{draft_forward / ratio:.3f}" if role == "target" else None,
        )
        for role in ("target", "draft")
        for tokens, ratio in steps[role].items()
    ]
    predictions = []
    for name, temperature, figures in texts:
        sd, ssd = (figures["predicted"][temperature][mode] for mode in ("sd", "ssd"))
        speeds = [(f"{mode['speed_up']:.2f}x", mode["k"]) for mode in (sd, ssd)]
        cells = *speeds[0], *speeds[1], ssd["budget"], f"{ssd['hit_rate']:.0%}"
        predictions.append((name, _TEXTS[temperature], *cells))
    kinds = [
        (
            name,
            kind,
            kind_figures["prompts"],
            f"{kind_figures['greedy_agreement']:.3f}",
            *_calls(kind_figures["tokens_per_call"]["greedy"]),
        )
        for name, figures in document["sets"].items()
        for kind, kind_figures in figures["kinds"].items()
    ]
    ks = [f"K={k}" for k in document["mean"]["tokens_per_call"]["greedy"]]
    by_kind = _table(
        "greedy text by kind of prompt", ("set", "kind", "prompts", "agreement", *ks), kinds
    )
    notes = ["agreement: of greedy text; sum min(p, q): of text at temperature 1"]
    if excluded := document["made_of"]["apart"]:
        notes.append(f"mean: without {', '.join(excluded)}")
    return [
        _table(
            f"draft {document['draft']}",
            ("set", "prompts", "agreement", "sum min(p, q)"),
            agreement,
            notes=notes,
        ),
        _table("tokens per call of the target", ("set", "text", "rounds", *ks), calls),
        *([by_kind] if kinds else []),
        _table(
            f"forwards of one text; the target's of 1 token takes {steps['target_ms']:.2f} ms",
            ("forward of", "tokens", "/ target's of 1", "draft's of 1 / this"),
            costs,
        ),
        _table(
            "fastest K and M that Theorem 7 predicts",
            ("set", "text", "SD / AR", "K", "SSD / AR", "K", "M", "hits"),
            predictions,
        ),
    ]


def _calls(per_call: Mapping[str, float | None]) -> list[str | None]:
    """Cells of tokens per call by K; empty where the texts took no call."""
    return [None if x is None else f"{x:.2f}" for x in per_call.values()]


def _table(
    title: str, names: Sequence[str], rows: Sequence[tuple[Any, ...]], notes: Sequence[str] = ()
) -> Page:
    cells = [tuple(None if cell is None else str(cell) for cell in row) for row in rows]
    columns: list[Column[tuple[str | None, ...]]] = [
        Column(title=name, cell=itemgetter(i), justify="left" if name in _NAMES else "right")
        for i, name in enumerate(names)
    ]
    return build_table(columns, cells, title=title, notes=notes)
