"""State of SSD beside its branches: of one sequence, and of one round of all. Pure host code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from ssd_jax.roles.records import ALL, BranchTokens, CacheLookup, DraftBatch, Drafted
from ssd_jax.speculation.acceptance import AcceptanceStats
from ssd_jax.speculation.backup import Backup
from ssd_jax.speculation.fan_out import After, FanOut, VerificationStats
from ssd_jax.speculation.tuner import SpeculationPlan


@dataclasses.dataclass(kw_only=True, eq=False)
class SequenceState:
    """A sequence in a slot, and the record that is verified next.

    Attributes:
      fan_out: policy of this sequence alone, so that its text depends on no other.
      backup: what a miss proposes without the draft.
      room: tokens that may still be committed.
      teaches: whether its text depends on no length, so that a tuner may learn from it; see
        `tuner.teaches`.
      branches: whether it is to have branches; without them proposals are drafted just in time.
      limit: most tokens of its next proposals, as far as is known.
      stats: of its rounds.
      length: L of the record.
      after: source of the record.
      confidence: the draft's confidence in the record's tokens, if known.
      has_run: whether the draft has run the record's tokens, since it made them.
      known_position: position up to which the text is known; -1 before the prompt is.
      last_prompt_token: the prompt's last token, until it has a record; else None.
      committed: tokens that the draft has had no record behind yet.
    """

    fan_out: FanOut
    backup: Backup
    room: int
    teaches: bool
    branches: bool = True
    limit: int = ALL
    stats: AcceptanceStats = dataclasses.field(default_factory=AcceptanceStats)
    length: int = 0
    after: After = "miss"
    confidence: tuple[int, ...] = ()
    has_run: bool = True
    known_position: int = -1
    last_prompt_token: int | None = None
    committed: list[int] = dataclasses.field(default_factory=list)

    def begin(self, length: int, after: After, confidence: Sequence[int], *, has_run: bool) -> None:
        """Continues with a new record."""
        self.length, self.after, self.has_run = length, after, has_run
        self.confidence = tuple(confidence[:length])

    def verified(self, accepted: int, prepared: int, rank: int | None) -> VerificationStats:
        """The result of the record's verification."""
        return VerificationStats(accepted, self.length, self.after, prepared, rank, self.confidence)

    @property
    def asks_confidence(self) -> bool:
        """Whether the fan-out wants the confidence in tokens that were drafted just in time."""
        drafted = self.has_run and self.length > len(self.confidence)
        return drafted and self.fan_out.reads_confidence

    def expected(self, length: int, more: int, confidence: Sequence[int] = ()) -> list[float]:
        """Tokens that a round is expected to commit with `length` to `length + more` proposed.

        Args:
          confidence: in the first `length` tokens. It counts only where the text depends on no
            length: else no length may follow from what was drawn.
        """
        known = confidence if self.teaches else ()
        return [self.stats.tokens(length + n, known) for n in range(more + 1)]

    def worth(self, limit: int) -> list[float]:
        """Expected worth of a round with 0, 1, ... `limit` tokens, in tokens, next hit included."""
        return [
            count + self.stats.next_round(empty=length == 0)
            for length, count in enumerate(self.expected(0, limit))
        ]

    def forks(self, budget: int) -> tuple[int, ...] | None:
        """F_0..F_L for the record, which sum to `budget`; None if no outcome has room to propose.

        An outcome with k accepted tokens leaves room for another proposal if k + 1 tokens, one
        proposed and the bonus after it may still be committed. k = L is kept regardless: its row
        runs s_L.
        """
        last = min(self.length, self.room - 3)
        if last < 0:
            return None
        if last == self.length:
            return self.fan_out.counts(last, budget, self.after, self.confidence)
        counts = self.fan_out.counts(last, budget - 1, self.after, self.confidence)
        return (*counts, *[0] * (self.length - last - 1), 1)

    def tree_counts(self, budget: int) -> tuple[int, ...] | None:
        """`budget` for each number of accepted tokens that leaves room; None if none does.

        The record is a tree with paths of up to L tokens; see `forks`.
        """
        last = min(self.length, self.room - 3)
        return None if last < 0 else (budget,) * (last + 1)

    def most_forwards(self) -> int:
        """Most forwards that bring every branch to the most tokens that its outcome has room for,
        and that its request may propose."""
        # Branches of k = L start one later.
        return min(self.room - (2 if self.length else 1), self.limit + 1)

    def lowered(self, after: After, plan: SpeculationPlan) -> list[int]:
        """D of Saguaro sampling for the K tokens of a record from this source.

        D counts the branches planned at each place, and the token drafted there.
        """
        return [count + 1 for count in self.fan_out.counts(plan.k, plan.budget, after)[:-1]]


def within_depth(parents: Sequence[int], limit: int) -> tuple[int, int]:
    """How many of a tree's first nodes have paths of up to `limit` tokens, and their longest.

    Args:
      parents: rows of the nodes' parents (see `sampling.topology`); a node comes after all that are
        less deep.
    """
    depths = [0]
    for parent in parents:
        if depths[parent] == limit:
            break
        depths.append(depths[parent] + 1)
    return len(depths) - 1, depths[-1]


@dataclasses.dataclass
class RoundState:
    """A round, beginning with the outcomes of the round before.

    Attributes:
      began: when it began, in seconds.
      limit: most tokens to propose.
      states: of its rows, by slot.
      sources: of their proposals: "hit", or why there was none. Rows that were to have no branches
        are left out.
      lengths: L of its proposals; at first only of those that hit.
      nodes: number of proposed tokens, where the proposals that hit are trees.
      confidence: the draft's in the tokens of the branches that were hit, by slot.
      backups: number of tokens that the backup proposes, by slot that missed.
      branches: those that were looked up.
      drafted: the proposal.
      waited: most tokens of a row that were drafted just in time, and the seconds they took.
      learned: whether the outcomes that it began with were learned.
    """

    began: float
    batch: DraftBatch
    limit: Int32[np.ndarray, "B"]
    states: dict[int, SequenceState]
    sources: dict[int, str]
    lookup: CacheLookup
    lengths: Int32[np.ndarray, "B"]
    nodes: dict[int, int] = dataclasses.field(default_factory=dict)
    confidence: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    backups: dict[int, int] = dataclasses.field(default_factory=dict)
    branches: BranchTokens | None = None
    drafted: Drafted | None = None
    waited: tuple[int, float] = (0, 0.0)
    learned: bool = False

    def usual(self) -> float:
        """Tokens that a round of these rows commits in all, by their recent rounds."""
        return sum(state.stats.usual(int(self.limit[slot])) for slot, state in self.states.items())

    def count_won(self, branches: BranchTokens) -> None:
        """Counts the tokens of the branches that were hit."""
        for slot in self.states:
            winner, limit = self.lookup.branch[slot], self.limit[slot]
            if winner < 0:
                continue
            length = branches.lengths[slot, winner]
            if branches.trees is not None:
                parents = branches.trees.parents[slot, winner, :length].tolist()
                self.nodes[slot], length = within_depth(parents, limit)
            else:
                self.confidence[slot] = branches.confidence[slot, winner, :length].tolist()
            length = min(length, limit)
            self.lengths[slot] = length

    def begin_records(self) -> None:
        """Tells each row of its new record."""
        for slot, state in self.states.items():
            winner, length = self.lookup.branch[slot], int(self.lengths[slot])
            if slot in self.backups:
                state.begin(length, "miss", (), has_run=not self.backups[slot])
            elif self.branches is not None:
                confidence = self.branches.confidence[slot, winner, :length].tolist()
                state.begin(length, "hit", confidence, has_run=True)
