"""Variants of programs by the parts of sampling that they have.

A `lax.cond` stops the host of a GPU, and the host knows whether rows are greedy, truncated or
penalised. So accelerators have a program for each of a few sets of parts, and the host takes the
cheapest program with all parts that its rows need. On CPU one program decides by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")


class Parts(NamedTuple):
    """Parts of sampling that some row of a batch needs.

    True: computed for all rows and selected row by row; False: left out, and no row may need it;
    None: decided on the device.

    Attributes:
      sampled: rows with a temperature other than 0; greedy rows are always included.
      truncated: top-k, top-p and min-p of sampled rows.
      adjusted: bans, bad words, penalties and bias.
    """

    sampled: bool | None = None
    truncated: bool | None = None
    adjusted: bool | None = None

    def has(self, needed: Parts) -> bool:
        """Whether rows that need these parts get them."""
        return all(
            available is not False or not required
            for available, required in zip(self, needed, strict=True)
        )


ON_DEVICE = Parts()
"""All parts, decided on the device."""

ANY = "any"
VARIANTS: Mapping[str, Parts] = {
    ANY: ON_DEVICE,
    "greedy": Parts(sampled=False, truncated=False, adjusted=False),
    "sampled": Parts(sampled=True, truncated=False, adjusted=False),
    "truncated": Parts(sampled=True, truncated=True, adjusted=False),
    "full": Parts(sampled=True, truncated=True, adjusted=True),
}
"""Parts by the name of a variant; of those without decisions the cheapest comes first."""


def variant_name(name: tuple[str | int, ...], variant: str) -> tuple[str | int, ...]:
    """The name of a program's variant; one that decides by itself has the program's own name."""
    return name if variant == ANY else (*name, variant)


Needed = Callable[[], Parts]
"""Returns the parts that the rows of a batch need; called only where programs differ in them."""


def cheapest_variant(
    programs: Container[tuple[str | int, ...]], name: tuple[str | int, ...], needed: Needed
) -> tuple[str | int, ...]:
    """The name of a program's cheapest existing variant that has the parts its rows need."""
    if name in programs:  # it decides by itself
        return name
    parts = needed()
    suitable = (
        variant_name(name, variant)
        for variant, available in VARIANTS.items()
        if available.has(parts)
    )
    return next(name for name in suitable if name in programs)


def when(
    part: bool | None,
    needed: jax.Array,
    then: Callable[..., T],
    otherwise: Callable[..., T],
    *operands: Any,
) -> T:
    """`then(*operands)` if `part` is True, `otherwise(*operands)` if it is False.

    If it is None, the device decides by `needed` [].
    """
    if part is None:
        return jax.lax.cond(needed, then, otherwise, *operands)
    return then(*operands) if part else otherwise(*operands)
