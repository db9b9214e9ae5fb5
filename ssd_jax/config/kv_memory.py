"""The setting `kv_memory`: a size, or a share of the memory."""

from __future__ import annotations

import re
from fractions import Fraction

from ssd_jax.errors import InputError

AUTO_SHARE = Fraction(9, 10)
"""Share of a memory that is used with `kv_memory = auto`."""
_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(?:\.[0-9]{1,6})?)\s*(?P<unit>KiB|MiB|GiB|TiB)?")
_SHARE = re.compile(r"(?P<percent>[0-9]{1,2}(?:\.[0-9]{1,6})?|100)%|(?P<part>0\.[0-9]{1,17}|1\.0)")
_UNITS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def share_of(kv_memory: float | str | None) -> Fraction | None:
    """The share of a memory that is filled by keys and values beside all else; None where it is a
    size or not given."""
    if kv_memory == "auto":
        return AUTO_SHARE
    share = _SHARE.fullmatch(str(kv_memory))
    if share is None:
        return None
    return Fraction(share["percent"]) / 100 if share["percent"] else Fraction(share["part"])


def bytes_of(kv_memory: float | str | None) -> int:
    """A size in bytes; 0 where it is not given.

    Raises:
      InputError: it is no size.
    """
    size = _SIZE.fullmatch(str(kv_memory or 0))
    if size is None or (size["unit"] is None and "." in size["number"]):
        raise InputError(
            f"kv_memory = {kv_memory!r} is not understood; give bytes, a number with MiB or GiB, "
            "such as 4GiB, a share of the memory, such as 90%, or auto"
        )
    return int(Fraction(size["number"]) * _UNITS[size["unit"]])
