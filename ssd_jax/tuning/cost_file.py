"""What was measured and observed at one start, kept for the next one on the same machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import MOST_JSON, read_bytes
from ssd_jax.tuning.throughput import Costs, Guess

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KnownCosts:
    """Costs, and what to assume of the acceptance before any of it was observed."""

    costs: Costs
    guess: Guess


class _Kept(msgspec.Struct):
    """The file: only what `write` writes has these types and ranges."""

    format: Literal[5]
    about: str
    costs: Costs
    guess: Guess


class CostFile:
    """A file of a cache. Whatever cannot be read as what `write` wrote is as if it were not there.

    Args:
      directory: where it is; None keeps nothing.
      about: what the costs depend on, as JSON has it; another `about` has another file.
    """

    def __init__(self, directory: Path | None, about: Mapping[str, Any]) -> None:
        # As text of ASCII: paths may have bytes that no UTF-8 has.
        self._about = json.dumps(about, sort_keys=True)
        name = hashlib.sha256(self._about.encode()).hexdigest()[:32]
        self.path = None if directory is None else directory / f"{name}.json"

    def read(self, *, widths: tuple[int, ...], budgets: tuple[int, ...]) -> KnownCosts | None:
        """What is known; None if nothing is, or not the costs of these widths and budgets."""
        if self.path is None:
            return None
        try:
            kept = msgspec.json.decode(read_bytes(self.path, most=MOST_JSON), type=_Kept)
        except (InputError, ValueError, RecursionError) as error:
            _LOG.debug("%s is not used: %r", self.path, error)
            return None
        costs = kept.costs
        needed = set(costs.verify) == set(widths) and set(costs.step) == set(budgets)
        return KnownCosts(costs, kept.guess) if needed and kept.about == self._about else None

    def write(self, known: KnownCosts) -> None:
        """Keeps it, whole or not at all; a directory that cannot be written keeps nothing."""
        if self.path is None:
            return
        kept = msgspec.json.encode(_Kept(5, self._about, known.costs, known.guess))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, kept)
        except OSError as error:
            _LOG.warning("measured costs are not kept: %s", error)
