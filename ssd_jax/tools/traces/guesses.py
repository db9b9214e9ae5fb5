"""The outcomes of one verification that branches were prepared for, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import new_file
from ssd_jax.tools.traces.read import EngineLanes

_HIT, _UNREALISED, _MISS = "#009E73", "#E8E8E8", "#D55E00"
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
    results, last_tokens = [], {}
    for number, round_ in enumerate(engine.rounds):
        for row in round_.args["rows"]:
            tokens = last_tokens.get(row["request"])
            if tokens and len(tokens) <= len(row.get("prepared", ())):
                results.append(Guesses(number, tokens, row["prepared"]))
            last_tokens[row["request"]] = row["tokens"]
    return results


def example(engine: EngineLanes) -> Guesses:
    """A hit with the most accepted tokens, else any round with guesses.

    Raises:
      InputError: the trace has none, such as one of mode sd.
    """
    candidates = guesses(engine)
    if not candidates:
        raise InputError("the trace has no prepared branches; trace a run of mode ssd")
    return max(candidates, key=lambda candidate: (candidate.hit, len(candidate.committed)))


def draw_guesses(guess: Guesses, decode: Callable[[list[int]], str], path: Path) -> None:
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

    def label(*tokens: int) -> str:
        return repr(decode([*tokens]))[1:-1].replace("$", r"\$")

    *accepted, bonus = guess.committed
    rows = min(_MOST_SHOWN, max(map(len, guess.prepared), default=0)) + 1
    figure = Figure(figsize=(2 * len(guess.prepared), 0.8 + 0.34 * rows), layout="constrained")
    axes = figure.subplots()
    box = {"boxstyle": "round,pad=0.35", "edgecolor": "none"}
    for k, tokens in enumerate(guess.prepared):
        is_outcome = k == len(accepted)
        head = f"{k} accepted" + (
            f": {label(*accepted)[-_HEAD:]}" if is_outcome and accepted else ""
        )
        axes.text(k, 0, head, ha="center", va="center", weight="bold" if is_outcome else "normal")
        drawn = [*tokens[:_MOST_SHOWN]]
        if is_outcome and bonus not in drawn:
            drawn = [*drawn[: _MOST_SHOWN - 1], bonus]
        for depth, token in enumerate(drawn, start=1):
            is_hit = is_outcome and token == bonus
            color = (_HIT if token in tokens else _MISS) if is_hit else _UNREALISED
            ink = {"color": "white" if is_hit else "black", "family": "monospace"}
            style = {"ha": "center", "va": "center", "bbox": box | {"facecolor": color}}
            axes.text(k, -depth, label(token) or "∅", **ink, **style)
    axes.set_xlim(-0.6, len(guess.prepared) - 0.4)
    axes.set_ylim(-rows - 0.2, 0.6)
    axes.axis("off")
    ending = "was prepared: a hit" if guess.hit else "was not prepared: a miss"
    outcome = f"the target kept {len(accepted)} and drew '{label(bonus)}', which {ending}"
    axes.set_title(f"round {guess.round}: {outcome}", loc="left", fontsize=11)
    with new_file(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None, dpi=130)
