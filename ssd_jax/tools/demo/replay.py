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

    time_ms: float
    spans: Sequence[TextSpan]
    source: str | None
    committed: int


def answers(engine: EngineLanes) -> list[list[RecordedStep]]:
    """The steps of each request of an engine, those of its prefill first."""
    steps_of: dict[int, list[RecordedStep]] = {}
    for slice_ in engine.target:
        is_round = "round" in slice_.args
        for row in slice_.args["rows"] if is_round else [slice_.args]:
            spans = [TextSpan(str(text), Origin(origin)) for text, origin in row.get("spans", ())]
            source, count = (row["source"], len(row["tokens"])) if is_round else (None, 0)
            steps_of.setdefault(row["request"], []).append(
                RecordedStep(slice_.end, spans, source, count)
            )
    return list(steps_of.values())


def _distinct(recorded: Sequence[list[RecordedStep]]) -> list[list[RecordedStep]]:
    """The answers without those that repeat another one, or its beginning."""
    texts = ["".join(span.text for step in steps for span in step.spans) for steps in recorded]
    distinct = [
        not any(
            other.startswith(text) and (len(other) > len(text) or index < number)
            for index, other in enumerate(texts)
            if index != number
        )
        for number, text in enumerate(texts)
    ]
    return [steps for steps, keep in zip(recorded, distinct, strict=True) if keep]


def play(path: Path, console: Console, *, sleep: Callable[[float], None] | None = None) -> None:
    """Shows each answer of the trace as it came, one after the other; each text once.

    The engine is the last one with a draft of its own, if there is one.

    Raises:
      InputError: no trace, a damaged one, or one without text.
    """
    engine = choose(read_trace(path), None)
    try:
        playable = [steps for steps in answers(engine) if any(step.spans for step in steps)]
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}; trace again") from None
    playable = _distinct(playable)
    if not playable:
        raise InputError(f"{path} has no text to play; trace again, with this version")
    for number, steps in enumerate(playable, start=1):
        title = f"{engine.name}, as recorded: answer {number} of {len(playable)}"
        with AnswerPane(console, title) as pane:
            previous_ms = steps[0].time_ms
            for step in steps:
                (sleep or time.sleep)((step.time_ms - previous_ms) / 1e3)
                previous_ms = step.time_ms
                pane.add(step.spans)
        rounds = [step for step in steps if step.committed]
        sources = [step.source for step in rounds if step.source is not None]
        hits = sources.count("hit")
        line = round_line([step.committed for step in rounds], hits, len(sources) - hits)
        seconds = (steps[-1].time_ms - steps[0].time_ms) / 1e3
        if seconds:
            line += f"; {sum(step.committed for step in rounds) / seconds:.1f} tokens/s"
        console.print(Text(f"{line}\n", style="dim"))
