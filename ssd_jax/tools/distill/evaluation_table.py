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
    has_kinds = any(figures["kinds"] for figures in document["sets"].values())
    by_kind = [_by_kind(document)] if has_kinds else []
    tables = [_agreement(document), _calls(document), *by_kind]
    return [*tables, _costs(document["steps"]), _predictions(document)]


def _agreement(document: Mapping[str, Any]) -> Page:
    rows = [
        (
            name,
            figures.get("prompts"),
            f"{figures['greedy_agreement']:.3f}",
            f"{figures['overlap']:.3f}",
        )
        for name, figures in _sets(document).items()
    ]
    notes = ["agreement: of greedy text; sum min(p, q): of text at temperature 1"]
    if excluded := document["made_of"]["apart"]:
        notes.append(f"mean: without {', '.join(excluded)}")
    names = "set", "prompts", "agreement", "sum min(p, q)"
    return _table(f"draft {document['draft']}", names, rows, notes)


def _calls(document: Mapping[str, Any]) -> Page:
    rows = [
        (name, text, rounds, *_by_k(figures["tokens_per_call"][key]))
        for name, figures in _sets(document).items()
        for temperature, text in _TEXTS.items()
        for rounds, key in (("SD", temperature), ("SSD, all hits", f"{temperature}_all_hits"))
    ]
    names = "set", "text", "rounds", *_ks(document)
    return _table("tokens per call of the target", names, rows)


def _by_kind(document: Mapping[str, Any]) -> Page:
    rows = [
        (
            name,
            kind,
            kind_figures["prompts"],
            f"{kind_figures['greedy_agreement']:.3f}",
            *_by_k(kind_figures["tokens_per_call"]["greedy"]),
        )
        for name, figures in document["sets"].items()
        for kind, kind_figures in figures["kinds"].items()
    ]
    names = "set", "kind", "prompts", "agreement", *_ks(document)
    return _table("greedy text by kind of prompt", names, rows)


def _costs(steps: Mapping[str, Any]) -> Page:
    draft_forward = steps["draft"]["1"]
    rows = [
        (
            role,
            tokens,
            f"{ratio:.3f}x",
            f"{draft_forward / ratio:.3f}" if role == "target" else None,
        )
        for role in ("target", "draft")
        for tokens, ratio in steps[role].items()
    ]
    return _table(
        f"forwards of one text; the target's of 1 token takes {steps['target_ms']:.2f} ms",
        ("forward of", "tokens", "/ target's of 1", "draft's of 1 / this"),
        rows,
    )


def _predictions(document: Mapping[str, Any]) -> Page:
    rows = []
    for name, figures in _sets(document).items():
        for temperature, text in _TEXTS.items():
            sd, ssd = (figures["predicted"][temperature][mode] for mode in ("sd", "ssd"))
            speeds = [(f"{mode['speed_up']:.2f}x", mode["k"]) for mode in (sd, ssd)]
            rows.append(
                (name, text, *speeds[0], *speeds[1], ssd["budget"], f"{ssd['hit_rate']:.0%}")
            )
    names = "set", "text", "SD / AR", "K", "SSD / AR", "K", "M", "hits"
    return _table("fastest K and M that Theorem 7 predicts", names, rows)


def _sets(document: Mapping[str, Any]) -> dict[str, Any]:
    return {**document["sets"], "mean": document["mean"]}


def _ks(document: Mapping[str, Any]) -> list[str]:
    """Titles of the columns of `_by_k`."""
    return [f"K={k}" for k in document["mean"]["tokens_per_call"]["greedy"]]


def _by_k(per_call: Mapping[str, float | None]) -> list[str | None]:
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
