"""How many experts rows use, without knowing which."""

from __future__ import annotations


def expected_experts(experts: int, rows: int, chosen: int) -> float:
    """Expected number of distinct experts of `rows` tokens, each of which chooses `chosen` of
    `experts` with equal odds: of one token `chosen`, of many all."""
    return experts * (1 - (1 - chosen / experts) ** rows)
