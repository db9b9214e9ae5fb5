"""A comparison: a verdict on every pair that is not identical, as a table."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from ssd_jax.errors import InputError
from ssd_jax.tools.bench.table import Column, Page, build_table, number_cell
from ssd_jax.tools.compare.judges import Finding, Judge
from ssd_jax.tools.compare.pairs import Pair

_STYLES = {"float": "green", "sampled": "green", "wrong": "red", "unknown": "yellow"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs compared.

    Attributes:
      findings: of the pairs that are not identical, in prompt order.
      limit: margins below it are explained by rounding; None without a model.
      bitwise: whether the runs promised bitwise exactness.
    """

    names: tuple[str, str]
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...]
    limit: float | None = None
    bitwise: bool = False

    @property
    def compared(self) -> int:
        """Prompts that both runs answered."""
        return sum(pair.compared for pair in self.pairs)

    @property
    def identical(self) -> int:
        """Prompts that both answered with the same ids."""
        return sum(pair.kind == "identical" for pair in self.pairs)

    @property
    def positions(self) -> list[int]:
        """Where texts part, ascending."""
        return sorted(pair.position for pair in self.pairs if pair.position is not None)

    @property
    def verdicts(self) -> Counter[str]:
        """Number of findings by verdict."""
        return Counter(finding.verdict for finding in self.findings if finding.verdict)

    @property
    def one_sided(self) -> int:
        """Prompts that only one run answered."""
        return sum(len(pair.answers) == 1 for pair in self.pairs)

    @property
    def exit_status(self) -> int:
        """1 if a difference is wrong, else 2 if prompts are missing, else 1 if one is unknown."""
        if self.verdicts["wrong"]:
            return 1
        if self.one_sided:
            return InputError.exit_status
        return 1 if self.verdicts["unknown"] else 0


def compare(
    names: tuple[str, str],
    pairs: Sequence[Pair],
    judge: Judge,
    *,
    limit: float | None = None,
    bitwise: bool = False,
) -> Comparison:
    """Judges every pair that is not identical; `judge` is asked about forks and early ends."""
    findings = tuple(
        judge(pair) if pair.compared else Finding(pair=pair, verdict=None)
        for pair in pairs
        if pair.kind != "identical"
    )
    return Comparison(
        names=names, pairs=tuple(pairs), findings=findings, limit=limit, bitwise=bitwise
    )


def comparison_table(comparison: Comparison) -> Page | Text:
    """Identical share, first forks, and a line for every difference."""
    identical, compared = comparison.identical, comparison.compared
    title = f"{identical} of {compared} prompts identical ({identical / compared:.0%})"
    if positions := comparison.positions:
        median = f"{statistics.median(positions):g} in the median"
        title += f"\nfirst difference: token {positions[0]} at the earliest, {median}"
    if not comparison.findings:
        return Text(title, style="bold")
    name_a, name_b = comparison.names
    columns: list[Column[Finding]] = [
        Column("prompt", lambda row: str(row.pair.prompt_index)),
        Column("position", lambda row: number_cell(row.pair.position, "{}")),
        Column(name_a, lambda row: _side(row, 0), "left"),
        Column(name_b, lambda row: _side(row, 1), "left"),
        Column("margin", lambda row: number_cell(row.margin, "{:.2g}")),
        Column("verdict", _verdict, "left"),
    ]
    return build_table(columns, comparison.findings, title=title, notes=_notes(comparison))


def _notes(comparison: Comparison) -> list[str]:
    verdicts, missing = comparison.verdicts, comparison.one_sided
    notes = ["position: index of the token, from 0"]
    if any(finding.margin is not None for finding in comparison.findings):
        notes[0] += "; margin: between the two, in logits"
    if verdicts["float"]:
        notes.append(
            f"float: the target finds both equal up to rounding (margin below {comparison.limit:g},"
            "\nor at the edge of what top-k, top-p and min-p keep)"
        )
    if verdicts["wrong"]:
        reason = (
            "bitwise exactness allows no fork" if comparison.bitwise else "it is less than that"
        )
        notes.append(f"wrong: not explained by rounding ({reason}): a bug, or other settings")
    if verdicts["sampled"]:
        notes.append(
            "sampled with --verify=ratio or block: texts of different modes are different draws of "
            "the same distribution"
        )
    if verdicts["unknown"]:
        notes.append(
            "unknown: ssd-jax compare says why, with --target, --prompt_file and the runs' settings"
            if comparison.limit is None
            else "unknown: the target with these settings says neither; give those of both runs"
        )
    if missing:
        subject = "prompt has" if missing == 1 else "prompts have"
        notes.append(f"{missing} {subject} an answer in one run only")
    return notes


def _side(finding: Finding, place: int) -> str | Text | None:
    """What one run has where the two part."""
    output = (finding.pair.a, finding.pair.b)[place]
    token, text = finding.pair.tokens[place], finding.texts[place]
    if output is None:
        return Text("no line", style="dim")
    if output.error is not None:
        return Text("failed" if output.finish_reason == "error" else "refused", style="dim")
    if token is not None:
        return f"{token}" if text is None else f"{token} {json.dumps(text, ensure_ascii=False)}"
    ends = finding.pair.position is not None
    return Text(f"ends ({output.finish_reason})", style="dim") if ends else None


def _verdict(finding: Finding) -> Text:
    if finding.verdict is None:
        return Text(finding.pair.kind, style="yellow")
    return Text(finding.verdict, style=_STYLES[finding.verdict])
