"""Variants of programs by the parts of sampling that they have.

A `lax.cond` stops the host of a GPU, and whether rows are greedy, truncated or penalised is what
the host knows. So accelerators have a program for each of a few sets of parts, and the host takes
the cheapest that has all that its rows need. On CPU one program decides by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")


class Parts(NamedTuple):
    """Parts of sampling that some row of a batch needs.

    True is computed for all rows and selected row by row; False is left out, and no row may need
    it; None is decided on the device.

    Attributes:
      sampled: rows of a temperature other than 0; greedy rows are always there.
      truncated: top-k, top-p and min-p of sampled rows.
      adjusted: bans, penalties and bias.
    """

    sampled: bool | None = None
    truncated: bool | None = None
    adjusted: bool | None = None

    def has(self, needed: Parts) -> bool:
        """Whether rows that need these parts get them."""
        return all(own is not False or not wanted for own, wanted in zip(self, needed, strict=True))


DECIDED = Parts()
"""All parts, decided on the device."""

DECIDING = "any"
VARIANTS: Mapping[str, Parts] = {
    DECIDING: DECIDED,
    "greedy": Parts(sampled=False, truncated=False, adjusted=False),
    "sampled": Parts(sampled=True, truncated=False, adjusted=False),
    "truncated": Parts(sampled=True, truncated=True, adjusted=False),
    "full": Parts(sampled=True, truncated=True, adjusted=True),
}
"""Parts by the name of a variant, the cheapest of those without decisions first."""


def named(name: tuple[str | int, ...], variant: str) -> tuple[str | int, ...]:
    """The name of a program's variant; one that decides by itself has the program's own."""
    return name if variant == DECIDING else (*name, variant)


Needed = Callable[[], Parts]
"""Tells the parts that the rows of a batch need; asked only where programs differ in them."""


def fitting(
    programs: Container[tuple[str | int, ...]], name: tuple[str | int, ...], needed: Needed
) -> tuple[str | int, ...]:
    """The name of a program's cheapest variant, of those there are, for rows of some needs."""
    if name in programs:  # it decides by itself
        return name
    parts = needed()
    fit = (named(name, variant) for variant, own in VARIANTS.items() if own.has(parts))
    return next(name for name in fit if name in programs)


def when(
    part: bool | None,
    needed: jax.Array,
    then: Callable[..., T],
    otherwise: Callable[..., T],
    *operands: Any,
) -> T:
    """`then(*operands)` where a part is there, `otherwise` where it is not; where that is decided
    on the device, by `needed` []."""
    if part is None:
        return jax.lax.cond(needed, then, otherwise, *operands)
    return then(*operands) if part else otherwise(*operands)
