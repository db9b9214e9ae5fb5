"""Plays the answers of a trace file in the pane, at their own pace, without any model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from ssd_jax.engine.origin import Origin, TextSpan
from ssd_jax.errors import InputError
from ssd_jax.tools.demo.pane import AnswerPane, round_line
from ssd_jax.tools.traces.picture import choose
from ssd_jax.tools.traces.read import EngineLanes, read_trace


class RecordedStep(NamedTuple):
    """What one program committed of an answer: when (ms), its text, and its round's row, if any."""

    at: float
    spans: Sequence[TextSpan]
    source: str | None
    committed: int


def answers(engine: EngineLanes) -> list[list[RecordedStep]]:
    """The steps of each request of an engine, those of its prefill first."""
    found: dict[int, list[RecordedStep]] = {}
    for each in engine.target:
        is_round = "round" in each.args
        for row in each.args["rows"] if is_round else [each.args]:
            spans = [TextSpan(str(text), Origin(origin)) for text, origin in row.get("spans", ())]
            source, count = (row["source"], len(row["tokens"])) if is_round else (None, 0)
            found.setdefault(row["request"], []).append(
                RecordedStep(each.end, spans, source, count)
            )
    return list(found.values())


def _distinct(found: Sequence[list[RecordedStep]]) -> list[list[RecordedStep]]:
    """The answers without those that repeat another one, or its beginning."""
    texts = ["".join(span.text for step in steps for span in step.spans) for steps in found]
    distinct = [
        not any(
            other.startswith(text) and (len(other) > len(text) or place < number)
            for place, other in enumerate(texts)
            if place != number
        )
        for number, text in enumerate(texts)
    ]
    return [steps for steps, keep in zip(found, distinct, strict=True) if keep]


def play(path: Path, console: Console, *, sleep: Callable[[float], None] | None = None) -> None:
    """Shows each answer of the trace as it came, one after the other; each text once.

    The engine is the last one with a draft of its own, if there is one.

    Raises:
      InputError: no trace, a damaged one, or one without text.
    """
    engine = choose(read_trace(path), None)
    try:
        found = [steps for steps in answers(engine) if any(step.spans for step in steps)]
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; trace again") from None
    found = _distinct(found)
    if not found:
        raise InputError(f"{path} has no text to play; trace again, with this version")
    for number, steps in enumerate(found, start=1):
        title = f"{engine.name}, as recorded: answer {number} of {len(found)}"
        with AnswerPane(console, title) as pane:
            before = steps[0].at
            for step in steps:
                (sleep or time.sleep)((step.at - before) / 1e3)
                before = step.at
                pane.add(step.spans)
        rounds = [step for step in steps if step.committed]
        sources = [step.source for step in rounds if step.source is not None]
        hits = sources.count("hit")
        line = round_line([step.committed for step in rounds], hits, len(sources) - hits)
        seconds = (steps[-1].at - steps[0].at) / 1e3
        if seconds:
            line += f"; {sum(step.committed for step in rounds) / seconds:.1f} tokens/s"
        console.print(Text(f"{line}\n", style="dim"))
