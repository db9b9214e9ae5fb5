"""Measured costs and observations of one start, kept for the next on the same machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import write_file
from ssd_jax.system.files import MAX_JSON, read_bytes
from ssd_jax.tuning.throughput import Costs, Guess

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KnownCosts:
    """Costs, and what to assume about acceptance before it is observed.

    Attributes:
      slowness: seconds of observed rounds over what the costs say of them; None before any were
        observed.
      doubted: whether the costs are to be measured again at the next start.
    """

    costs: Costs
    guess: Guess
    slowness: Annotated[float, Meta(gt=0)] | None = None
    doubted: bool = False


class _FileContent(msgspec.Struct):
    """Content of the file: only what `write` writes has these types and ranges."""

    format: Literal[10]
    key: str
    known: KnownCosts


class CostFile:
    """A file in a cache. Content that `write` cannot have written counts as missing.

    Args:
      directory: directory of the file; None keeps nothing.
      key: what the costs depend on, as JSON; another `key` has another file.
    """

    def __init__(self, directory: Path | None, key: Mapping[str, Any]) -> None:
        # As ASCII text: paths may contain bytes that are not UTF-8.
        self._key = json.dumps(key, sort_keys=True)
        self._has_warned = False
        name = hashlib.sha256(self._key.encode()).hexdigest()[:32]
        self.path = None if directory is None else directory / f"{name}.json"

    def read(self, *, widths: tuple[int, ...], budgets: tuple[int, ...]) -> KnownCosts | None:
        """The known costs; None if nothing is known, or not for these widths and budgets."""
        if self.path is None:
            return None
        try:
            # An error's traceback would keep the caller's frame, and so a model's arrays, until
            # garbage is collected.
            if not self.path.exists():
                return None
            content = msgspec.json.decode(
                read_bytes(self.path, max_bytes=MAX_JSON), type=_FileContent
            )
        except (InputError, OSError, ValueError, RecursionError) as error:
            _LOG.debug("%s is not used: %r", self.path, error)
            return None
        costs = content.known.costs
        has_sizes = all(
            set(sizes.verify) == set(widths) and set(sizes.step) == set(budgets)
            for sizes in (costs, *costs.few.values())
        )
        return content.known if has_sizes and content.key == self._key else None

    def write(self, known: KnownCosts) -> None:
        """Writes the file, whole or not at all; an unwritable directory keeps nothing."""
        if self.path is None:
            return
        content = msgspec.json.encode(_FileContent(10, self._key, known))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, content)
        except OSError as error:
            if not self._has_warned:
                _LOG.warning(
                    "measured costs are not kept, and measured again at the next start: %s; give "
                    "another `compile_cache`, or another cache by XDG_CACHE_HOME",
                    error,
                )
            self._has_warned = True
