"""Metrics of a request. Names are part of the interface; a key that does not apply is None."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

REQUEST_KEYS = (
    "tokens_per_second",
    "ttft_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    "itl_p99_ms",
    "acceptance_length",
    "acceptance_histogram",
    "acceptance_length_on_hit",
    "acceptance_length_on_miss",
    "hit_rate",
    "hidden_draft_share",
    "round_ms",
    "verify_ms",
    "verify_idle_ms",
    "step_ms",
    "fallbacks",
    "bytes_per_round",
)


def empty() -> dict[str, Any]:
    """Every key, none applying."""
    return dict.fromkeys(REQUEST_KEYS)


@dataclasses.dataclass(kw_only=True)
class RequestTimes:
    """When a request arrived and when each of its committed tokens was read, in seconds."""

    arrived: float
    tokens: list[float] = dataclasses.field(default_factory=list)
    verify: list[float] = dataclasses.field(default_factory=list)

    def committed(self, count: int, now: float) -> None:
        """Notes `count` tokens committed at time `now`."""
        self.tokens.extend([now] * count)

    def verified(self, seconds: float) -> None:
        """Notes one target forward, from its dispatch until its outcome was read."""
        self.verify.append(seconds)

    def summary(self) -> dict[str, Any]:
        """The metrics over committed tokens only; decode speed leaves the prefill out.

        Of n tokens the first belongs to the prefill, so decode speed is (n - 1) tokens over the
        time since the first.
        """
        metrics = empty()
        if not self.tokens:
            return metrics
        metrics["ttft_ms"] = 1e3 * (self.tokens[0] - self.arrived)
        gaps = np.diff(self.tokens)
        if len(gaps):
            elapsed = self.tokens[-1] - self.tokens[0]
            metrics["tokens_per_second"] = len(gaps) / elapsed if elapsed > 0 else None
            for percent in (50, 95, 99):
                metrics[f"itl_p{percent}_ms"] = 1e3 * float(np.percentile(gaps, percent))
        rounds = np.diff(np.unique(self.tokens))
        if len(rounds):
            metrics["round_ms"] = 1e3 * float(np.median(rounds))
        if self.verify:
            metrics["verify_ms"] = 1e3 * float(np.median(self.verify))
        return metrics
