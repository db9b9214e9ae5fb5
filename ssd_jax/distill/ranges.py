"""Ranges of ids, such as 1-10,511-974."""

from __future__ import annotations

import re

from ssd_jax.errors import InputError

_RANGE = re.compile(r"\s*(\d+)(?:-(\d+))?\s*")


def parse_ranges(text: str, where: str) -> tuple[range, ...]:
    """The ranges of a text such as "1-10,511-974"; both ends belong to a range.

    Raises:
      InputError: no such text, or a range that ends before it begins; the message begins with
        `where`.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(end or match[1]) for end in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{where}: {part.strip()!r} of {text!r} is no range; give ids such as 1-10,511-974"
            )
        ranges.append(range(first, last + 1))
    return tuple(ranges)
