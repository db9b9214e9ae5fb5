"""The progress of training: `metrics.jsonl`, and a picture of it.

It has one line a step and one for each look at held-out text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssd_jax.system.atomic import errors_name_path, write_file
from ssd_jax.system.files import parse_json, read_bytes
from ssd_jax.tools.distill.training.losses import Sums

METRICS, PICTURE = "metrics.jsonl", "training.png"

# Colours are those of Okabe and Ito.
_TRAIN, _HELD_OUT, _FAINT = "#0072B2", "#D55E00", 0.25
_SMOOTHING_WINDOW = 50
"""Most steps that a smoothed line averages, which are at most a tenth of all steps."""


class Journal:
    """Appends to a file of JSON lines.

    Args:
      path: the file; made if need be.
      step: training continues after this step (-1: it begins): what a killed run wrote of later
        steps is dropped, as is a line that it wrote half.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self.path = path
        entries = [entry for entry in read_journal(path) if entry["step"] <= step]
        write_file(path, "".join(json.dumps(entry) + "\n" for entry in entries).encode())

    def last_look(self) -> dict[str, float]:
        """Means at the last look at held-out text; empty without one."""
        looks = [entry["held_out"] for entry in read_journal(self.path) if "held_out" in entry]
        return looks[-1] if looks else {}

    def write(self, **entry: Any) -> None:
        """Adds a line."""
        with errors_name_path(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a journal; none if there is no file."""
    if not path.exists():
        return []
    entries = []
    for line in read_bytes(path).decode(errors="replace").splitlines():
        try:
            entries.append(parse_json(line))
        except ValueError:
            break  # the line that a kill cut off
    return entries


def means(sums: Sums, *, with_target: bool = True) -> dict[str, float]:
    """Means per position from sums over positions, by their names in a journal.

    Args:
      sums: of a batch, or of several.
      with_target: include figures that compare with the target's distribution, which needs its
        probabilities.
    """
    positions = max(float(sums.positions), 1.0)
    totals = {"loss": sums.loss, "cross_entropy": sums.cross_entropy}
    if with_target:
        totals |= {"kl": sums.kl, "acceptance": sums.overlap, "agreement": sums.agreements}
    return {name: float(value) / positions for name, value in totals.items()}


def write_picture(work: Path) -> str:
    """Draws loss and, where known, acceptance by step of a directory of training, if possible.

    Returns: why there is no new picture; empty if there is one, or no step to draw.
    """
    entries = read_journal(work / METRICS)
    steps = [entry for entry in entries if "held_out" not in entry]
    if not steps:
        return ""
    try:
        image = _draw(steps, [entry for entry in entries if "held_out" in entry])
        write_file(work / PICTURE, image, durable=True)
    except ModuleNotFoundError:
        return f"no {PICTURE}: drawing needs matplotlib; pip install 'ssd-jax[plot]'"
    except (OSError, ValueError) as error:  # the latter of MPLBACKEND
        return f"no {PICTURE}: {error}"
    return ""


def _draw(steps: Sequence[dict[str, Any]], looks: Sequence[dict[str, Any]]) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    titles = {"loss": "loss a position"}
    if any("acceptance" in entry for entry in steps):
        titles["acceptance"] = "acceptance, sum of min(p, q)"
    figure = Figure(figsize=(4.5 * len(titles), 3.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(titles), squeeze=False)[0]
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        x, y = [e["step"] for e in steps], np.array([e[name] for e in steps])
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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _smooth(values: np.ndarray) -> np.ndarray:
    """A mean over the last few values."""
    window = max(1, min(_SMOOTHING_WINDOW, len(values) // 10))
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    return (sums[ends] - sums[begins]) / (ends - begins)
