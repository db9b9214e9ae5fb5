"""Computes the metrics of a request from its rounds."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from ssd_jax.engine.request_metrics import REQUEST_KEYS, RequestMetrics
from ssd_jax.roles.activity import Busy, DraftCost, overlap
from ssd_jax.roles.records import CacheLookup
from ssd_jax.speculation.acceptance import AcceptanceEstimator


def empty() -> RequestMetrics:
    """All metrics, none of which applies."""
    return cast("RequestMetrics", dict.fromkeys(REQUEST_KEYS))


class RowLookup(NamedTuple):
    """One row of a `CacheLookup` that had an outcome.

    `rank` is None where no branch was prepared for the outcome, or none was proposed for another
    reason. `wasted` are the tokens of all branches, less those that became the proposal.
    """

    k: int
    prepared: int
    rank: int | None
    wasted: int


def row_lookup(lookup: CacheLookup | None, row: int, proposed: int) -> RowLookup | None:
    """The look-up of a row that has proposed so many tokens; None where it had no outcome."""
    if lookup is None or lookup.k[row] < 0:
        return None
    k, prepared, rank = (int(array[row]) for array in (lookup.k, lookup.prepared, lookup.rank))
    branch = lookup.branch[row]
    promoted = 0 if branch < 0 else proposed if lookup.node is None else lookup.lengths[row, branch]
    wasted = int(lookup.lengths[row].sum() - promoted)
    return RowLookup(k, prepared, None if rank < 0 else rank, wasted)


def prepared_bonus(lookup: CacheLookup | None, row: int) -> list[list[int]]:
    """The bonus tokens that a row had branches for, likeliest first, by k; empty without any.

    Of a tree they come by its rows.
    """
    if lookup is None or lookup.bonus is None or lookup.k[row] < 0:
        return []
    tokens = lookup.bonus[row].tolist()
    if lookup.node is not None:
        nodes = lookup.node[row].tolist()
        by_node: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
        for node, token in zip(nodes, tokens, strict=True):
            if token >= 0:
                by_node[node].append(token)
        return by_node
    ends = [0, *lookup.ends[row]]
    return [[t for t in tokens[begin:end] if t >= 0] for begin, end in pairwise(ends)]


@dataclasses.dataclass(kw_only=True)
class RoundRecord:
    """One target forward, as one request saw it.

    Attributes:
      proposed: L.
      accepted: k.
      committed: tokens added to the output.
      seconds: from the later of its dispatch and the reading of the previous outcome, until its own
        outcome was read.
      read: when its outcome was read.
      source: "hit", or the cause of a fallback, where a speculation cache was looked up.
      lookup: result of the look-up, where the outcome was a new one.
      cost: of the proposal, where the draft has devices of its own.
      alone: whether the draft was idle meanwhile; None where that is not known.
      tree: whether a tree was verified; None where only chains are proposed.
      mode: ar, where the engine did without the draft, sd or ssd.
      batch: see `Outcomes`.
    """

    proposed: int = 0
    accepted: int = 0
    committed: int
    seconds: float
    read: float = 0.0
    source: str | None = None
    lookup: RowLookup | None = None
    cost: DraftCost | None = None
    alone: bool | None = None
    tree: bool | None = None
    mode: str = "sd"
    batch: int = 0

    def truncate(self, committed: int) -> None:
        """Keeps the first `committed` tokens; tokens behind an end count as never proposed."""
        if committed <= self.accepted:
            self.proposed = self.accepted = committed
        self.committed = min(self.committed, committed)


@dataclasses.dataclass(kw_only=True)
class RequestTimes:
    """When a request arrived, when each committed token was read (seconds), and its rounds.

    Attributes:
      speculative: whether a drafter takes part.
      shared_device: the drafter keeps the target's device busy, so that the time from dispatch to
        outcome is not the verification's alone.
      setup: metrics that are the same for every request.
      planned: whether the engine decides in which mode its rounds are.
      kv_pages: pages that it holds, where slots share them.
      cached_tokens: tokens of its prompt whose keys and values its pages held when it began.
      preemptions: times that it was preempted for want of pages.
      prefills: cost of its prefill to a draft with devices of its own, during rounds of others.
    """

    arrived: float
    speculative: bool = False
    shared_device: bool = False
    setup: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    planned: bool = False
    kv_pages: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    tokens: list[float] = dataclasses.field(default_factory=list)
    rounds: list[RoundRecord] = dataclasses.field(default_factory=list)
    prefills: list[DraftCost] = dataclasses.field(default_factory=list)

    def drafted(self, spans: Collection[Busy], read: float) -> None:
        """Takes the draft's work since the last proposal, and when the last outcome was read.

        That outcome is of a round of this request, unless it was preempted since its last round.
        """
        if self.rounds and self.rounds[-1].read == read:
            last = self.rounds[-1]
            draft_spans = [(span.begin, span.end) for span in spans]
            last.alone = not overlap(last.read - last.seconds, last.read, draft_spans)

    def keep(self, count: int) -> None:
        """Forgets everything after the first `count` tokens."""
        del self.tokens[count:]
        remaining = count - 1  # the first token is the prefill's
        for index, verified in enumerate(self.rounds):
            if remaining <= 0:
                del self.rounds[index:]
                return
            if remaining < verified.committed:
                verified.truncate(remaining)
            remaining -= verified.committed

    def summary(self) -> RequestMetrics:
        """The metrics over committed tokens only; decode speed excludes the prefill.

        The first of n tokens belongs to the prefill, so decode speed is (n - 1) tokens over the
        time since the first.
        """
        pages = {name: getattr(self, name) for name in ("kv_pages", "cached_tokens", "preemptions")}
        metrics: dict[str, Any] = {**empty(), **pages, **self.setup}
        if self.tokens:
            metrics |= self._times()
            if self.speculative and self.rounds:
                metrics |= _acceptance(self.rounds) | _cache(self.rounds)
                metrics |= _draft(self.rounds, self.prefills)
                if self.planned:
                    modes = Counter(verified.mode for verified in self.rounds)
                    metrics["mode"] = modes.most_common(1)[0][0]
        return cast("RequestMetrics", metrics)

    def _times(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"ttft_ms": 1e3 * (self.tokens[0] - self.arrived)}
        gaps = np.diff(self.tokens)
        if len(gaps):
            elapsed = self.tokens[-1] - self.tokens[0]
            metrics["tokens_per_second"] = len(gaps) / elapsed if elapsed > 0 else None
            for percent in (50, 95, 99):
                metrics[f"itl_p{percent}_ms"] = 1e3 * float(np.percentile(gaps, percent))
        rounds = np.diff(np.unique(self.tokens))
        if len(rounds):
            metrics["round_ms"] = 1e3 * float(np.median(rounds))
        if self.rounds and not self.shared_device:
            seconds = [verified.seconds for verified in self.rounds]
            metrics["verify_ms"] = 1e3 * float(np.median(seconds))
        batches = Counter(verified.batch for verified in self.rounds if verified.batch)
        metrics["batch_sizes"] = sorted(batches.items()) or None
        return metrics


def _acceptance(rounds: list[RoundRecord]) -> dict[str, Any]:
    """Acceptance length = tokens committed per target forward, bonus included.

    The histogram counts rounds by committed tokens, from 1. By position: (accepted, judged), where
    a proposed token was judged if all tokens before it were accepted.
    """
    histogram = np.bincount([verified.committed for verified in rounds])[1:]
    counted = AcceptanceEstimator()
    for verified in rounds:
        counted.observe(verified.accepted, range(verified.proposed))
    positions = range(max(verified.proposed for verified in rounds))
    trees = [verified.tree for verified in rounds if verified.tree is not None]
    return {
        "acceptance_length": float(np.mean([verified.committed for verified in rounds])),
        "acceptance_histogram": histogram.tolist(),
        "acceptance_by_position": [(counted.accepted[i], counted.judged[i]) for i in positions],
        "draft_tokens": sum(verified.proposed for verified in rounds),
        "tree_rounds": sum(trees) if trees else None,
        "plain_rounds": sum(verified.mode == "ar" for verified in rounds),
    }


def _cache(rounds: list[RoundRecord]) -> dict[str, Any]:
    """Hit rate = hits / rounds with a look-up; a fallback of any cause is a miss."""
    looked_up = [verified for verified in rounds if verified.source is not None]
    if not looked_up:
        return {}
    hits = [verified.committed for verified in looked_up if verified.source == "hit"]
    misses = [verified.committed for verified in looked_up if verified.source != "hit"]
    causes = Counter(verified.source for verified in looked_up if verified.source != "hit")
    looks = [verified.lookup for verified in looked_up if verified.lookup is not None]
    return {
        "hit_rate": len(hits) / len(looked_up),
        **_by_outcome(looks),
        "acceptance_length_on_hit": float(np.mean(hits)) if hits else None,
        "acceptance_length_on_miss": float(np.mean(misses)) if misses else None,
        "miss_causes": dict(causes),
    }


def _by_outcome(looks: list[RowLookup]) -> dict[str, Any]:
    """Hit rates by k and by rank, and wasted draft tokens.

    By k: (hits, look-ups) where k tokens were accepted. By rank: (hits, look-ups) where a branch of
    this rank had been prepared for the k that came.
    """
    if not looks:
        return {}
    by_k = [
        (sum(look.rank is not None for look in of_k), len(of_k))
        for k in range(1 + max(look.k for look in looks))
        for of_k in [[look for look in looks if look.k == k]]
    ]
    by_rank = [
        (sum(look.rank == rank for look in looks), sum(look.prepared > rank for look in looks))
        for rank in range(max(look.prepared for look in looks))
    ]
    return {
        "hit_rate_by_k": by_k,
        "hit_rate_by_rank": by_rank,
        "wasted_draft_tokens": sum(look.wasted for look in looks),
    }


def _draft(rounds: list[RoundRecord], prefills: list[DraftCost]) -> dict[str, Any]:
    """Metrics of a draft with devices of its own over these rounds; see `activity`."""
    costs = [verified.cost for verified in rounds if verified.cost is not None]
    if not costs:
        return {}
    on_hit = [v.cost for v in rounds if v.cost is not None and v.source == "hit"]
    steps = [seconds for cost in costs for seconds in cost.steps]
    alone = [verified.seconds for verified in rounds if verified.alone]
    trips = [cost.round_trip for cost in costs if cost.round_trip is not None]
    return {
        "hidden_draft_share": _hidden(prefills + costs),
        "hidden_draft_share_on_hit": _hidden(on_hit),
        "step_ms": 1e3 * float(np.median(steps)) if steps else None,
        "verify_idle_ms": 1e3 * float(np.median(alone)) if alone else None,
        "bytes_per_round": float(np.mean([cost.bytes for cost in costs])),
        "round_trip_ms": 1e3 * float(np.median(trips)) if trips else None,
    }


def _hidden(costs: list[DraftCost]) -> float | None:
    busy = sum(cost.busy for cost in costs)
    return sum(cost.hidden for cost in costs) / busy if busy else None
