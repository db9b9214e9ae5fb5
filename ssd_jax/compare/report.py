"""A comparison as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table
from rich.text import Text

from ssd_jax.bench.report import SCHEMA_VERSION, json_safe
from ssd_jax.bench.table import Column, build_table, number_cell
from ssd_jax.compare.findings import Comparison, Finding
from ssd_jax.compare.outputs import Output

_STYLES = {"float": "green", "sampled": "green", "law": "red", "unknown": "yellow"}


def comparison_table(comparison: Comparison) -> Table | Text:
    """Identical share, first forks, and a line for every difference."""
    if not comparison.findings:
        return Text(_title(comparison), style="bold")
    one, other = comparison.names
    columns: list[Column[Finding]] = [
        Column(title="prompt", cell=lambda row: str(row.pair.prompt_index)),
        Column(title="position", cell=lambda row: number_cell(row.pair.position, "{}")),
        Column(title=one, cell=lambda row: _side(row, 0), justify="left"),
        Column(title=other, cell=lambda row: _side(row, 1), justify="left"),
        Column(title="margin", cell=lambda row: number_cell(row.margin, "{:.2g}")),
        Column(title="verdict", cell=_verdict, justify="left"),
    ]
    return build_table(
        columns, comparison.findings, title=_title(comparison), notes=_notes(comparison)
    )


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as an object for `json.dumps`; infinite margins are null."""
    positions = comparison.positions
    document = {
        "schema_version": SCHEMA_VERSION,
        "a": comparison.names[0],
        "b": comparison.names[1],
        "prompts": len(comparison.pairs),
        "compared": comparison.compared,
        "identical": comparison.identical,
        "identical_share": comparison.identical / comparison.compared,
        "first_fork_median": comparison.median_position,
        "first_fork_earliest": positions[0] if positions else None,
        "verdicts": {verdict: comparison.verdicts[verdict] for verdict in _STYLES},
        "limit": comparison.limit,
        "bitwise": comparison.bitwise,
        "differences": [_difference(finding) for finding in comparison.findings],
    }
    return json_safe(document)


def _difference(finding: Finding) -> dict[str, Any]:
    pair = finding.pair
    sides = {
        name: None
        if output is None
        else {
            "token_id": pair.tokens[place],
            "text": finding.texts[place],
            "tokens": len(output.token_ids),
            "finish_reason": output.finish_reason,
            "error": output.error,
        }
        for place, (name, output) in enumerate((("a", pair.a), ("b", pair.b)))
    }
    return {
        "prompt_index": pair.prompt_index,
        "kind": pair.kind,
        "position": pair.position,
        **sides,
        "margin": finding.margin,
        "verdict": finding.verdict,
    }


def _title(comparison: Comparison) -> str:
    same, of = comparison.identical, comparison.compared
    title = f"{same} of {of} prompts identical ({same / of:.0%})"
    positions = comparison.positions
    if not positions:
        return title
    first, median = positions[0], comparison.median_position
    return f"{title}\nfirst difference: token {first} at the earliest, {median:g} in the median"


def _notes(comparison: Comparison) -> list[str]:
    verdicts, notes = comparison.verdicts, []
    if comparison.findings:
        notes.append("position: index of the token, from 0; margin: between the two, in logits")
    if verdicts["float"]:
        notes.append(
            f"float: the target finds both equal up to rounding (margin below {comparison.limit:g},"
            "\nor at the edge of what top-k, top-p and min-p keep)"
        )
    if verdicts["law"]:
        because = (
            "bitwise exactness allows no fork" if comparison.bitwise else "it is less than that"
        )
        notes.append(f"law: not explained by rounding ({because}): a bug, or other settings")
    if verdicts["sampled"]:
        notes.append(
            "sampled with --verify=ratio: texts of different modes are different draws of the same "
            "law"
        )
    if verdicts["unknown"]:
        notes.append(
            "unknown: give --target and --prompt_file, with the settings of both runs"
            if comparison.limit is None
            else "unknown: the target with these settings says neither; give those of both runs"
        )
    if comparison.one_sided:
        notes.append(_one_sided(comparison.one_sided))
    return notes


def _side(finding: Finding, place: int) -> str | Text | None:
    """What one run says where they part."""
    output = (finding.pair.a, finding.pair.b)[place]
    token, text = finding.pair.tokens[place], finding.texts[place]
    if output is None:
        return Text("no line", style="dim")
    if output.error is not None:
        return Text("failed" if output.finish_reason == "error" else "refused", style="dim")
    if token is None:
        return _end(finding, output)
    return f"{token}" if text is None else f"{token} {json.dumps(text, ensure_ascii=False)}"


def _end(finding: Finding, output: Output) -> Text | None:
    if finding.pair.position is None:
        return None
    return Text(f"ends ({output.finish_reason})", style="dim")


def _verdict(finding: Finding) -> Text | None:
    if finding.verdict is None:
        return Text(finding.pair.kind, style="yellow")
    return Text(finding.verdict, style=_STYLES[finding.verdict])


def _one_sided(count: int) -> str:
    return f"{count} prompt{' has' if count == 1 else 's have'} an answer in one run only"
