"""What was measured and observed at one start, kept for the next one on the same machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.atomic import write_file
from ssd_jax.errors import InputError
from ssd_jax.files import read_json
from ssd_jax.speculation.tuning import Costs, Guess

_FORMAT = 3
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    InputError,
    LookupError,
    TypeError,
    ValueError,
)
_LOG = logging.getLogger(__name__)


class Known(NamedTuple):
    """Costs, and what to assume of the acceptance before any of it was observed."""

    costs: Costs
    guess: Guess


class CostFile:
    """A file of a cache. Whatever cannot be read as what `write` wrote is as if it were not there.

    Args:
      directory: where it is; None keeps nothing.
      about: what the costs depend on, as JSON has it; another `about` has another file.
    """

    def __init__(self, directory: Path | None, about: Mapping[str, Any]) -> None:
        self._about = json.loads(json.dumps(about))
        text = json.dumps(self._about, sort_keys=True)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.path = None if directory is None else directory / f"{name}.json"

    def read(self, *, widths: tuple[int, ...], budgets: tuple[int, ...]) -> Known | None:
        """What is known; None if nothing is.

        Args:
          widths, budgets: of which costs are needed.
        """
        if self.path is None:
            return None
        try:
            kept = read_json(self.path)
            if kept["format"] != _FORMAT or kept["about"] != self._about:
                return None
            costs = kept["costs"]
            costs = Costs(
                verify=_by_number(costs["verify"], widths),
                draft=_number(costs["draft"]),
                backup=_number(costs["backup"]),
                step=_by_number(costs["step"], budgets),
                contention=_number(costs["contention"]),
            )
            guess = Guess(
                acceptance=_number(kept["guess"]["acceptance"]),
                alone=_number(kept["guess"]["alone"]),
                judged=int(_number(kept["guess"]["judged"])),
            )
            if max(guess.acceptance, guess.alone) > 1:
                return None
        except _UNREADABLE as error:
            _LOG.debug("%s is not used: %r", self.path, error)
            return None
        return Known(costs, guess)

    def write(self, known: Known) -> None:
        """Keeps it, whole or not at all; a directory that cannot be written keeps nothing."""
        if self.path is None:
            return
        kept = {
            "format": _FORMAT,
            "about": self._about,
            "costs": dataclasses.asdict(known.costs),
            "guess": {
                name: getattr(known.guess, name) for name in ("acceptance", "alone", "judged")
            },
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(kept).encode())
        except OSError as error:
            _LOG.warning("measured costs are not kept: %s", error)


def _by_number(values: Any, numbers: tuple[int, ...]) -> dict[int, float]:
    if set(values) != {str(number) for number in numbers}:
        raise ValueError(f"{sorted(values)} instead of {numbers}")
    return {number: _number(values[str(number)], above=0.0) for number in numbers}


def _number(value: Any, *, above: float = -math.ulp(0.0)) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= above:
        raise ValueError(f"{value!r} is no number that was written here")
    return float(value)
