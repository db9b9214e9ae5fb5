"""The batch sizes that a user asks for."""

from __future__ import annotations

import re

from ssd_jax.errors import InputError

_LIST = re.compile(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*")


def parse(text: str, slots: int) -> tuple[int, ...]:
    """Batch sizes below that of all slots, ascending.

    Args:
      text: auto or all: 1, 2, 4 and so on; off: none; or a list such as 1,8.
      slots: of a group of devices.

    Raises:
      InputError: neither of these, or a size that is not below `slots`.
    """
    if text == "off":
        return ()
    if text in ("auto", "all"):
        return tuple(2**power for power in range((slots - 1).bit_length()))
    if not _LIST.fullmatch(text):
        raise InputError(
            f"batch_sizes = {text!r} is not understood; give auto, all, off or a list such as 1,4"
        )
    sizes = sorted({int(size) for size in text.split(",")})
    if sizes[-1] >= slots:
        raise InputError(
            f"batch_sizes = {text!r}: {sizes[-1]} is not below the {slots} slots that a batch has "
            "anyway; leave it out, or give more slots"
        )
    return tuple(sizes)
