"""Compares a batch of the first slots with the one of all slots that ran beside it."""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Bool

from ssd_jax.roles.records import Outcomes


def same_logits(few: jax.Array, every: jax.Array, live: Bool[np.ndarray, "groups slots"]) -> bool:
    """Whether the live rows that both batches have are the same bits.

    Args:
      few: logits of the first slots of each group of devices, slot after slot.
      every: of all slots.
    """
    groups, slots = live.shape
    batch, all_slots = (np.asarray(array).view(np.int32) for array in (few, every))
    batch = batch.reshape(groups, -1, len(all_slots) // live.size, all_slots.shape[1])
    all_slots = all_slots.reshape(groups, slots, *batch.shape[2:])[:, : batch.shape[1]]
    rows = live[:, : batch.shape[1]]
    return np.array_equal(batch[rows], all_slots[rows])


def same_outcomes(one: Outcomes, other: Outcomes, live: Bool[np.ndarray, "B"]) -> bool:
    """Whether the live rows of both have accepted and emitted the same."""
    accepted = one.accepted[live]
    emitted = np.arange(one.tokens.shape[1]) <= accepted[:, None]
    pairs = [(accepted, other.accepted[live])]
    pairs.append((one.tokens[live][emitted], other.tokens[live][emitted]))
    if one.node is not None and other.node is not None:
        pairs.append((one.node[live], other.node[live]))
    return all(np.array_equal(*pair) for pair in pairs)
