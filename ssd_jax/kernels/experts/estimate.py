"""How many experts rows use, without knowing which."""

from __future__ import annotations

import functools
import math

import numpy as np


def expected_experts(experts: int, rows: int, chosen: int, devices: int = 1) -> float:
    """Expected number of distinct experts of `rows` tokens, each of which chooses `chosen` of
    `experts` with equal odds: of one token `chosen`, of many all.

    With several devices that have as many of the experts each: those of the device with most of
    them, which the others wait for.
    """
    used = experts * (1 - (1 - chosen / experts) ** rows)
    if devices == 1:
        return used
    few = math.floor(used)
    low, high = (_expected_most(experts, min(n, experts), devices) for n in (few, few + 1))
    return low + (used - few) * (high - low)


def expected_share(experts: int, rows: int, chosen: int, devices: int) -> float:
    """Expected part of the choices of `rows` tokens that are of the device's experts whose number
    `expected_experts` gives, as if each of these had as many rows."""
    everywhere = expected_experts(experts, rows, chosen)
    return expected_experts(experts, rows, chosen, devices) / everywhere


@functools.cache
def _expected_most(experts: int, used: int, devices: int) -> float:
    """Expected most of `used` experts, drawn out of all, that one device has.

    As if a coin decided for each expert, and `used` were found to be drawn.
    """
    held = experts // devices
    of_device = np.array([math.comb(held, n) / 2**held for n in range(held + 1)])
    of_all = functools.reduce(np.convolve, [of_device] * devices)[used]
    total = 0.0
    for most in range(len(of_device) - 1):
        at_most = functools.reduce(np.convolve, [of_device[: most + 1]] * devices)
        total += 1 - (at_most[used] / of_all if used < len(at_most) else 0)
    return total
