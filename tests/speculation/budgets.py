"""Budgets of a fan-out policy, and that it uses one whole."""

from __future__ import annotations

from ssd_jax.speculation.fan_out import Counts

LENGTHS, BUDGETS, RATES = (0, 1, 2, 4, 7, 16), (1, 2, 3, 5, 8, 16, 24, 61), (0.01, 0.3, 0.8, 0.99)


def require_whole(counts: Counts, length: int, budget: int) -> None:
    """The whole budget is used, and the last slot is not empty."""
    assert len(counts) == length + 1
    assert sum(counts) == budget
    assert min(counts) >= 0
    assert counts[-1] >= 1
