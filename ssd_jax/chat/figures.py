"""Figures of answers: the line after each, and the table of `/stats`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from rich.table import Table

from ssd_jax.bench.table import Column, build_table, number_cell
from ssd_jax.runtime.request import RequestOutput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer: how it was decoded, the tokens of its prompt, and what came out."""

    mode: str
    prompt_tokens: int
    output: RequestOutput

    @property
    def stopped(self) -> bool:
        """Whether the user cut it off."""
        return self.output.finish_reason == "cancelled"

    @property
    def context_used(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + len(self.output.token_ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures over answers; None where none applies.

    Attributes:
      tokens_per_second: of decoding alone: tokens after each answer's first, over their time.
      first_token_ms: median time from the request to the first token.
      acceptance_length: tokens committed per target forward, bonus included.
      hit_rate: hits / rounds with a look-up.
    """

    answers: int
    stopped: int
    prompt_tokens: int
    answer_tokens: int
    tokens_per_second: float | None
    first_token_ms: float | None
    acceptance_length: float | None
    hit_rate: float | None


def figures(answers: Sequence[Answer]) -> Figures:
    """Figures over answers, each token counting alike."""
    outputs = [answer.output for answer in answers]
    decoded = seconds = rounds = committed = hits = looked_up = 0.0
    for output in outputs:
        speed, histogram = (
            output.metrics[k] for k in ("tokens_per_second", "acceptance_histogram")
        )
        if speed:
            decoded += len(output.token_ids) - 1
            seconds += (len(output.token_ids) - 1) / speed
        for tokens, count in enumerate(histogram or (), start=1):
            rounds += count
            committed += tokens * count
        if output.metrics["hit_rate"] is not None:
            misses, rate = sum(output.metrics["fallbacks"].values()), output.metrics["hit_rate"]
            count = round(misses / (1 - rate)) if misses else sum(histogram)
            looked_up += count
            hits += count - misses
    first = [ms for output in outputs if (ms := output.metrics["ttft_ms"]) is not None]
    return Figures(
        answers=len(answers),
        stopped=sum(answer.stopped for answer in answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        answer_tokens=sum(len(output.token_ids) for output in outputs),
        tokens_per_second=decoded / seconds if seconds else None,
        first_token_ms=statistics.median(first) if first else None,
        acceptance_length=committed / rounds if rounds else None,
        hit_rate=hits / looked_up if looked_up else None,
    )


def summary(answer: Answer, context: int) -> str:
    """One line about an answer, and why it ended where that is not its own end."""
    found, tokens = figures([answer]), len(answer.output.token_ids)
    parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
    if found.tokens_per_second is not None:
        parts.append(f"{found.tokens_per_second:.1f} tokens/s")
    if found.acceptance_length is not None:
        parts.append(f"acceptance length {found.acceptance_length:.2f}")
    if found.hit_rate is not None:
        parts.append(f"hit rate {found.hit_rate:.2f}")
    parts.append(f"context {answer.context_used} of {context}")
    if answer.stopped:
        parts.append("stopped")
    elif answer.output.finish_reason == "error":
        parts.append("ended by an error")
    elif answer.output.finish_reason == "length":
        full = answer.context_used >= context
        parts.append("cut off: the context is full" if full else "cut off by --max_tokens")
    return f"[{', '.join(parts)}]"


def stats_table(answers: Sequence[Answer], context: int) -> Table:
    """The last answer beside the session; modes apart, so that their speeds can be compared."""
    modes = dict.fromkeys(answer.mode for answer in answers)
    shown = {f"last answer ({answers[-1].mode})": figures(answers[-1:])}
    for mode in modes:
        shown[f"session, {mode}"] = figures([a for a in answers if a.mode == mode])
    rows: list[tuple[str, list[str | None]]] = [
        ("answers", [f"{f.answers}" for f in shown.values()]),
        ("answers stopped", [f"{f.stopped}" for f in shown.values()]),
        ("prompt tokens", [f"{f.prompt_tokens}" for f in shown.values()]),
        ("answer tokens", [f"{f.answer_tokens}" for f in shown.values()]),
        (
            "decoding, tokens/s",
            [number_cell(f.tokens_per_second, "{:.1f}") for f in shown.values()],
        ),
        (
            "first token, ms (median)",
            [number_cell(f.first_token_ms, "{:.0f}") for f in shown.values()],
        ),
        (
            "acceptance length, tokens/forward",
            [number_cell(f.acceptance_length, "{:.2f}") for f in shown.values()],
        ),
        (f"context used, of {context} tokens", [f"{answers[-1].context_used}"]),
    ]
    if any(f.hit_rate is not None for f in shown.values()):
        rates = [number_cell(f.hit_rate, "{:.2f}") for f in shown.values()]
        rows.insert(-1, ("hit rate", rates))
    columns = [Column[tuple[str, list[str | None]]](title="", cell=lambda r: r[0], justify="left")]
    for place, title in enumerate(shown):
        columns.append(
            Column(title=title, cell=lambda r, p=place: r[1][p] if p < len(r[1]) else "")
        )
    return build_table(columns, rows)
