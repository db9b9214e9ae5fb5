"""A pane in which an answer streams, its words coloured by where they come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ssd_jax.engine.origin import Origin, TextSpan
from ssd_jax.system.files import printable

MOST_COLUMNS = 100


class _Look(NamedTuple):
    """How the words of an origin look; the marks stand around them where there are no colours."""

    label: str
    style: str
    marks: tuple[str, str]


LOOKS = {
    Origin.TARGET: _Look("target's own", "bold", ("", "")),
    Origin.DRAFT: _Look("accepted draft", "cyan", ("«", "»")),
    Origin.BRANCH: _Look("prepared branch", "green", ("«", "»")),
    Origin.BACKUP: _Look("drafted after a miss", "magenta", ("‹", "›")),
}
"""The colours of hits and of just-in-time drafts are those of the picture of a trace."""


class AnswerPane:
    """Shows an answer while it grows on a terminal, else once it is whole; for a `with`.

    Args:
      title: above the answer, such as its prompt.

    Attributes:
      tokens: number of tokens of each origin so far.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, printable(title)
        self._colours = console.is_terminal and not console.no_color
        self._answer = Text()
        self._live: Live | None = None
        self._stack = ExitStack()
        self.tokens: Counter[Origin] = Counter()

    def __enter__(self) -> AnswerPane:
        if self._console.is_interactive and not self._console.is_dumb_terminal:
            live = Live(self._render(), console=self._console, vertical_overflow="visible")
            self._live = self._stack.enter_context(live)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._live is None:
            self._console.print(self._render())
        else:
            self._live.update(self._render())
        self._stack.close()

    def add(self, spans: Sequence[TextSpan]) -> None:
        """Adds the tokens that a round has committed."""
        self.tokens.update(span.origin for span in spans)
        for origin, origin_spans in groupby(spans, key=lambda span: span.origin):
            text = printable("".join(span.text for span in origin_spans))
            look = LOOKS[origin]
            if self._colours or not text.strip():
                self._answer.append(text, look.style)
                continue
            words = text.strip()
            begin = text.index(words)
            leading, trailing = text[:begin], text[begin + len(words) :]
            self._answer.append(leading + look.marks[0] + words + look.marks[1] + trailing)
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> Group:
        width = min(self._console.width, MOST_COLUMNS)
        title = Text(f"> {self._title}", style="bold", overflow="ellipsis", no_wrap=True)
        pane = Panel(self._answer, title=title, title_align="left", box=box.ROUNDED, width=width)
        return Group(pane, legend(self.tokens, colours=self._colours))


def legend(tokens: Counter[Origin], *, colours: bool) -> Text:
    """What the looks mean, with the number of tokens of each origin that occurs."""
    entries = []
    for origin, look in LOOKS.items():
        if not tokens[origin]:
            continue
        if colours:
            entries.append(Text("■ ", look.style) + Text(f"{look.label} {tokens[origin]}", "dim"))
        else:
            entries.append(Text(look.label.join(look.marks) + f" {tokens[origin]}"))
    return Text("   ").join([Text("tokens:", "dim"), *entries])


def round_line(committed: Iterable[int], hits: int, misses: int) -> str:
    """One line about the rounds of an answer: their number, tokens a round, and hits.

    Args:
      committed: tokens of each round.
    """
    counts = list(committed)
    if not counts:
        return "no round: the prompt's own forward gave the only token"
    line = f"{len(counts)} rounds of the target, {sum(counts) / len(counts):.2f} tokens a round"
    if hits + misses:
        line += f"; the draft had prepared for {hits} of {hits + misses} outcomes"
    return line
