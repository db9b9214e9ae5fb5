"""Loss and, where known, acceptance by step, as a picture. Colours are those of Okabe and Ito."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssd_jax.distill.training.journal import METRICS, read_journal
from ssd_jax.system.atomic import write_file

PICTURE = "training.png"

_TRAIN, _HELD_OUT, _FAINT = "#0072B2", "#D55E00", 0.25
_SMOOTHED = 50
"""Steps that a smoothed line averages, at most; a tenth of all steps, at most."""


def picture_of(work: Path) -> str:
    """Draws the journal of a directory of training beside it, if that can be done.

    Returns: why there is no new picture; empty if there is one, or no step to draw.
    """
    entries = read_journal(work / METRICS)
    if not any("held_out" not in entry for entry in entries):
        return ""
    try:
        _draw(work / PICTURE, entries)
    except ModuleNotFoundError:
        return f"no {PICTURE}: drawing needs matplotlib; pip install 'ssd-jax[plot]'"
    except OSError as error:
        return f"no {PICTURE}: {error}"
    return ""


def _draw(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    steps = [entry for entry in entries if "held_out" not in entry]
    looks = [entry for entry in entries if "held_out" in entry]
    titles = {"loss": "loss a position"}
    if any("acceptance" in entry for entry in steps):
        titles["acceptance"] = "acceptance, sum of min(p, q)"
    figure = Figure(figsize=(4.5 * len(titles), 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
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
        if name == "acceptance":
            panel.set_ylim(0, 1)
        else:  # it begins many times as high as it ends
            panel.set_yscale("log")
            panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_file(path, drawn.getvalue(), durable=True)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A mean over the last few values."""
    window = max(1, min(_SMOOTHED, len(values) // 10))
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)
