"""What a round costs by its parts: drafting and verifying, each waited for.

In decoding the two are dispatched without waiting; here they are timed one after the other, so
that the ceiling of hiding the draft, 1 + t_draft / t_verify, can be told (paper, Corollary 9).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ssd_jax.bench.stats import Estimate, median_interval
from ssd_jax.bench.table import Column, build_table, estimate_cell, number_cell
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import IDLE, Drafter, SlotOpening, Target, draft_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Medians over rounds, in milliseconds.

    Attributes:
      draft_ms: from the request for proposals until they are there.
      verify_ms: from dispatch until the outcome is there.
      gain: what SSD with the same K reached in decoding, over SD.
    """

    draft_ms: Estimate
    verify_ms: Estimate
    gain: Estimate | None = None

    @property
    def ceiling(self) -> float:
        """Speed-up over SD if drafting cost nothing and nothing else changed."""
        return 1 + self.draft_ms.median / self.verify_ms.median


def time_round(
    target: Target,
    drafter: Drafter,
    wait: Callable[[Any], Any],
    params: SamplingParams,
    *,
    rounds: int = 12,
    prompt: int = 40,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundCosts:
    """Times rounds of one request in slot 0; whatever is emitted, one token is kept of each.

    Args:
      target, drafter: roles with empty slots.
      wait: returns when a proposal is there.
      params: how the request is sampled.
      rounds: timed ones; two more come first.
      prompt: tokens of the prompt.
      clock: seconds.
    """
    for role in (target, drafter):
        role.open(SlotOpening(0, params))
    ids = [1 + index % 97 for index in range(prompt)]
    pending = int(target.prefill_last(0, ids, 0).read().tokens[0, 0])
    drafter.prefill(0, ids, 0, last=True)
    draft, verify = [], []
    for position in range(prompt, prompt + rounds + 2):
        started = clock()
        batch = draft_batch(target.slots, drafter.k + 1)
        batch.position[0], batch.tokens[0, 0], batch.counts[0] = position, pending, 1
        batch.limit[0], batch.room[0] = drafter.k, 2**30
        drafted = drafter.propose(batch)
        proposal = drafter.proposal()
        wait(proposal)
        drafted_at = clock()
        tokens = np.zeros(target.slots, np.int32)
        lengths = np.full(target.slots, IDLE, np.int32)
        tokens[0], lengths[0] = pending, position
        outcomes = target.accept(target.forward(tokens, lengths, drafted), proposal).read()
        verify.append(1e3 * (clock() - drafted_at))
        draft.append(1e3 * (drafted_at - started))
        pending = int(outcomes.tokens[0, 0])
    draft_ms, verify_ms = median_interval(draft[2:]), median_interval(verify[2:])
    assert draft_ms is not None
    assert verify_ms is not None
    return RoundCosts(draft_ms=draft_ms, verify_ms=verify_ms)


def costs_json(costs: Mapping[str, RoundCosts]) -> dict[str, Any]:
    """For `json.dumps`: by variant."""
    return {
        name: dataclasses.asdict(each) | {"ceiling": each.ceiling} for name, each in costs.items()
    }


def costs_table(costs: Mapping[str, RoundCosts]) -> Table:
    """A line a variant: the parts of a round, and what hiding the draft would reach."""
    columns: list[Column[tuple[str, RoundCosts]]] = [
        Column(title="variant", cell=lambda row: Text(row[0], style="cyan"), justify="left"),
        Column(title="draft ms", cell=lambda row: estimate_cell(row[1].draft_ms, "{:.1f}")),
        Column(title="verify ms", cell=lambda row: estimate_cell(row[1].verify_ms, "{:.1f}")),
        Column(title="ceiling", cell=lambda row: number_cell(row[1].ceiling, "{:.2f}x")),
        Column(title="ssd / sd", cell=lambda row: estimate_cell(row[1].gain, "{:.2f}x")),
    ]
    notes = ["ceiling: 1 + draft / verify, what hiding the draft behind verification would gain"]
    if any(each.gain is not None for each in costs.values()):
        notes.append("ssd / sd: what SSD gained in tokens/s, hits, misses and waits included")
    return build_table(columns, list(costs.items()), title="a round by its parts", notes=notes)
