"""`metrics.jsonl`: one line a step, and one for each look at held-out text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ssd_jax.distill.training.losses import Sums
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import MOST_TEXT, parse_json, read_bytes

METRICS = "metrics.jsonl"


class Journal:
    """Appends to a file of JSON lines.

    Args:
      path: the file; made if need be.
      step: training goes on after this step (-1: it begins): what a killed run wrote of later ones
        is dropped, as is a line that it wrote half.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        kept = [entry for entry in read_journal(path) if entry["step"] <= step]
        write_file(path, "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    def entries(self) -> list[dict[str, Any]]:
        """All lines so far."""
        return read_journal(self._path)

    def write(self, **entry: Any) -> None:
        """Adds a line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a journal; none if there is no file."""
    if not path.exists():
        return []
    entries = []
    for line in read_bytes(path, most=MOST_TEXT).decode(errors="replace").splitlines():
        try:
            entries.append(parse_json(line))
        except ValueError:
            break  # the line that a kill cut off
    return entries


def means(sums: Sums, *, known: bool = True) -> dict[str, float]:
    """What sums over positions are a position, by the names that a journal has.

    Args:
      sums: of a batch, or of several.
      known: whether anything is known of the target's distribution; else what compares with it is
        left out.
    """
    positions = max(float(sums.positions), 1.0)
    found = {"loss": sums.loss, "cross_entropy": sums.cross_entropy}
    if known:
        found |= {"kl": sums.kl, "acceptance": sums.accepted, "agreement": sums.agreed}
    return {name: float(value) / positions for name, value in found.items()}
