"""Loss and acceptance by step, as a picture. Colours are those of Okabe and Ito."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_TRAIN, _HELD_OUT, _FAINT = "#0072B2", "#D55E00", 0.25
_SMOOTHED = 50
"""Steps that a smoothed line averages, at most; a tenth of all steps, at most."""


def can_draw() -> bool:
    """Whether matplotlib (the `plot` extra) is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Draws a journal; `path` is a PNG file.

    Raises:
      ModuleNotFoundError: matplotlib is not installed; see `can_draw`.
    """
    from matplotlib.figure import Figure

    steps = [entry for entry in entries if "held_out" not in entry]
    looks = [entry for entry in entries if "held_out" in entry]
    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {"loss": "loss a position", "acceptance": "acceptance, sum of min(p, q)"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        x, y = [e["step"] for e in steps], np.array([e[name] for e in steps])
        if len(steps):
            panel.plot(x, y, color=_TRAIN, alpha=_FAINT, linewidth=0.8)
            panel.plot(x, _smooth(y), color=_TRAIN, label="training text")
        if looks:
            points = [e["step"] for e in looks], [e["held_out"][name] for e in looks]
            panel.plot(*points, color=_HELD_OUT, marker="o", markersize=4, label="held-out text")
        panel.set(title=title, xlabel="step")
        panel.grid(alpha=_FAINT)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    panels[1].set_ylim(0, 1)
    figure.savefig(path, format="png")


def _smooth(values: np.ndarray) -> np.ndarray:
    """A mean over the last few values."""
    window = max(1, min(_SMOOTHED, len(values) // 10))
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)
