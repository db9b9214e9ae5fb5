"""The outcomes of one verification that branches were prepared for, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import new_file
from ssd_jax.tools.traces.read import EngineLanes

_HIT, _OTHER, _MISS = "#009E73", "#E8E8E8", "#D55E00"
_HEAD = 14  # characters of the accepted text
_MOST_SHOWN = 8
"""Bonus tokens of each k that are drawn, likeliest first."""


class Guesses(NamedTuple):
    """What a draft had prepared for the outcome of a verification.

    Attributes:
      round: number of the round that it was looked up for.
      committed: ids of the round before: the k accepted tokens, then the bonus token.
      prepared: bonus tokens that branches were prepared for, likeliest first, by k.
    """

    round: int
    committed: Sequence[int]
    prepared: Sequence[Sequence[int]]

    @property
    def hit(self) -> bool:
        """Whether the outcome was among them."""
        *accepted, bonus = self.committed
        return bonus in self.prepared[len(accepted)]


def guesses(engine: EngineLanes) -> list[Guesses]:
    """Those of every round that had any."""
    found, before = [], {}
    for number, each in enumerate(engine.rounds):
        for row in each.args["rows"]:
            last = before.get(row["request"])
            if last and len(last) <= len(row.get("prepared", ())):
                found.append(Guesses(number, last, row["prepared"]))
            before[row["request"]] = row["tokens"]
    return found


def example(engine: EngineLanes) -> Guesses:
    """A hit with the most accepted tokens, else any round with guesses.

    Raises:
      InputError: the trace has none, such as one of mode sd.
    """
    found = guesses(engine)
    if not found:
        raise InputError("the trace has no prepared branches; trace a run of mode ssd")
    return max(found, key=lambda each: (each.hit, len(each.committed)))


def draw_guesses(found: Guesses, decode: Callable[[list[int]], str], path: Path) -> None:
    """Draws a column for each number of accepted tokens, with the bonus tokens prepared for it.

    Args:
      decode: the text of token ids.
      path: its ending names the kind of picture.

    Raises:
      InputError: matplotlib is missing.
      OSError: the file cannot be written there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("drawing needs matplotlib; pip install 'ssd-jax[plot]'") from None

    def word(*tokens: int) -> str:
        return repr(decode([*tokens]))[1:-1].replace("$", r"\$")

    *accepted, bonus = found.committed
    rows = min(_MOST_SHOWN, max(map(len, found.prepared), default=0)) + 1
    figure = Figure(figsize=(2 * len(found.prepared), 0.8 + 0.34 * rows), layout="constrained")
    axes = figure.subplots()
    box = {"boxstyle": "round,pad=0.35", "edgecolor": "none"}
    for k, tokens in enumerate(found.prepared):
        came = k == len(accepted)
        head = f"{k} accepted" + (f": {word(*accepted)[-_HEAD:]}" if came and accepted else "")
        axes.text(k, 0, head, ha="center", va="center", weight="bold" if came else "normal")
        shown = [*tokens[:_MOST_SHOWN]]
        if came and bonus not in shown:
            shown = [*shown[: _MOST_SHOWN - 1], bonus]
        for place, token in enumerate(shown, start=1):
            right = came and token == bonus
            color = (_HIT if token in tokens else _MISS) if right else _OTHER
            ink = {"color": "white" if right else "black", "family": "monospace"}
            style = {"ha": "center", "va": "center", "bbox": box | {"facecolor": color}}
            axes.text(k, -place, word(token) or "∅", **ink, **style)
    axes.set_xlim(-0.6, len(found.prepared) - 0.4)
    axes.set_ylim(-rows - 0.2, 0.6)
    axes.axis("off")
    how = "was prepared: a hit" if found.hit else "was not prepared: a miss"
    outcome = f"the target kept {len(accepted)} and drew '{word(bonus)}', which {how}"
    axes.set_title(f"round {found.round}: {outcome}", loc="left", fontsize=11)
    with new_file(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None, dpi=130)
