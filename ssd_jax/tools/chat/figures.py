"""Figures of answers: the line after each, and the table of `/stats`."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from ssd_jax.engine.request import RequestOutput
from ssd_jax.tools.bench.table import Column, Page, build_table, number_cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer: its mode, the number of its prompt's tokens, and its output."""

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
    decoded_tokens = seconds = rounds = committed_tokens = hits = looked_up = 0.0
    for output in outputs:
        metrics = output.metrics
        speed, histogram = metrics["tokens_per_second"], metrics["acceptance_histogram"]
        if speed:
            decoded_tokens += len(output.token_ids) - 1
            seconds += (len(output.token_ids) - 1) / speed
        for tokens, count in enumerate(histogram or (), start=1):
            rounds += count
            committed_tokens += tokens * count
        hit = sum(hit for hit, _ in metrics["hit_rate_by_k"] or ())
        hits += hit
        looked_up += hit + sum((metrics["miss_causes"] or {}).values())
    ttfts = [ms for output in outputs if (ms := output.metrics["ttft_ms"]) is not None]
    return Figures(
        answers=len(answers),
        stopped=sum(answer.stopped for answer in answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        answer_tokens=sum(len(output.token_ids) for output in outputs),
        tokens_per_second=decoded_tokens / seconds if seconds else None,
        first_token_ms=statistics.median(ttfts) if ttfts else None,
        acceptance_length=committed_tokens / rounds if rounds else None,
        hit_rate=hits / looked_up if looked_up else None,
    )


def summary(answer: Answer, context: int) -> str:
    """One line about an answer, and why it ended unless it ended by itself."""
    totals, tokens = figures([answer]), len(answer.output.token_ids)
    items = [f"{tokens} token{'' if tokens == 1 else 's'}"]
    for form, value in (
        ("{:.1f} tokens/s", totals.tokens_per_second),
        ("acceptance length {:.2f}", totals.acceptance_length),
        ("hit rate {:.2f}", totals.hit_rate),
    ):
        items += [] if value is None else [form.format(value)]
    items.append(f"context {answer.context_used} of {context}")
    if answer.stopped:
        items.append("stopped")
    elif answer.output.finish_reason == "error":
        items.append("ended by an error")
    elif answer.output.finish_reason == "length":
        full = answer.output.limit == "context"
        items.append("cut off: the context is full" if full else "cut off by --max_tokens")
    return f"[{', '.join(items)}]"


def stats_table(answers: Sequence[Answer], context: int) -> Page:
    """The last answer, and the session by mode so that speeds can be compared."""
    columns_by_title = {f"last answer ({answers[-1].mode})": figures(answers[-1:])}
    for mode in dict.fromkeys(answer.mode for answer in answers):
        columns_by_title[f"session, {mode}"] = figures([a for a in answers if a.mode == mode])
    rows = [
        (
            title,
            [number_cell(getattr(figures_, name), form) for figures_ in columns_by_title.values()],
        )
        for title, name, form in _ROWS
        if name != "hit_rate"
        or any(figures_.hit_rate is not None for figures_ in columns_by_title.values())
    ]
    rows.append((f"context used, of {context} tokens", [f"{answers[-1].context_used}"]))
    columns: list[Column[_StatsRow]] = [Column("", lambda row: row[0], "left")]
    for index, title in enumerate(columns_by_title):
        columns.append(
            Column(title, lambda row, index=index: row[1][index] if index < len(row[1]) else "")
        )
    return build_table(columns, rows)


_StatsRow = tuple[str, list[str | None]]
_ROWS = (
    ("answers", "answers", "{}"),
    ("answers stopped", "stopped", "{}"),
    ("prompt tokens", "prompt_tokens", "{}"),
    ("answer tokens", "answer_tokens", "{}"),
    ("decoding, tokens/s", "tokens_per_second", "{:.1f}"),
    ("first token, ms (median)", "first_token_ms", "{:.0f}"),
    ("acceptance length, tokens/forward", "acceptance_length", "{:.2f}"),
    ("hit rate", "hit_rate", "{:.2f}"),
)
