"""Records and branches of scripted drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ssd_jax.roles.records import BranchTokens, no_branches
from ssd_jax.sampling.confidence import UNKNOWN


@dataclasses.dataclass
class Branch:
    """A branch of a record: it follows `path`, s_1..s_k and the bonus token."""

    path: list[int]
    tokens: list[int]


@dataclasses.dataclass
class Record:
    """What the target verifies next in a slot; `host` tokens are not the draft's own."""

    start: int
    tokens: list[int]
    host: bool
    won: bool = False


def as_branch_tokens(
    branches: Mapping[int, Sequence[Branch | None]],
    shape: tuple[int, int, int],
    forwards: int,
    confidence: Callable[[int, Branch, int], int] = lambda slot, branch, place: UNKNOWN,
) -> BranchTokens:
    """Branches by slot as arrays of `shape`, B, M and K; `confidence` is that of their tokens."""
    slots, most, k = shape
    found = no_branches(slots, most, k, forwards)
    for slot, rows in branches.items():
        for row, branch in enumerate(rows):
            if branch is not None:
                length = len(branch.tokens)
                found.bonus[slot, row], found.lengths[slot, row] = branch.path[-1], length
                found.tokens[slot, row, :length] = branch.tokens
                found.confidence[slot, row, :length] = [
                    confidence(slot, branch, place) for place in range(length)
                ]
    return found
