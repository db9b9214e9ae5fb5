"""What a response says of the speculation that made its texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ssd_jax.engine.request_metrics import RequestMetrics


def speculation_report(texts: Sequence[RequestMetrics]) -> dict[str, Any]:
    """The `metrics` of a response.

    `speculative_decoding` is vLLM's object, over all texts of the request; None where no proposal
    was verified, and then `reason` says why.

    Args:
      texts: the metrics of the request's texts.
    """
    modes = sorted({metrics["mode"] for metrics in texts if metrics["mode"] is not None})
    statistics = _statistics(texts)
    rates = [metrics["hit_rate"] for metrics in texts if metrics["hit_rate"] is not None]
    return {
        "mode": ", ".join(modes) or None,
        "speculating": statistics is not None,
        "reason": None if statistics is not None else _reason(texts),
        "hit_rate": sum(rates) / len(rates) if rates else None,
        "speculative_decoding": statistics,
    }


def _statistics(texts: Sequence[RequestMetrics]) -> dict[str, Any] | None:
    """vLLM's statistics; a step is a round that verified a proposal."""
    histogram, tokens = Counter[int](), 0
    for metrics in texts:
        places = metrics["acceptance_by_position"] or []
        if not places:
            continue
        # Rounds that accepted at least 0, 1, ... tokens.
        reached = [places[0][1], *(accepted for accepted, _ in places), 0]
        histogram.update({k: more - less for k, (more, less) in enumerate(pairwise(reached))})
        tokens += metrics["draft_tokens"] or 0
    steps = histogram.total()
    if not steps:
        return None
    accepted = sum(k * count for k, count in histogram.items())
    most = max(len(metrics["acceptance_by_position"] or []) for metrics in texts)
    return {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / tokens if tokens else 0.0,
        "acceptance_histogram": [histogram[k] for k in range(most + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": tokens,
        "num_spec_tokens": most,
    }


def _reason(texts: Sequence[RequestMetrics]) -> str:
    """Why no text had a proposal."""
    if all(metrics["mode"] in ("ar", None) for metrics in texts):
        return "the request was decoded in mode ar, without a draft"
    causes = Counter[str]()
    for metrics in texts:
        causes.update(metrics["miss_causes"] or {})
    if causes["dead"]:
        return "the draft worker is out of reach"
    if causes:
        return f"no proposal came in time ({', '.join(sorted(causes))})"
    if any(metrics["plain_rounds"] for metrics in texts):
        return "mode auto found it faster without the draft"
    return "the texts ended before a proposal could be verified"
