"""What a draft is asked to do, as its programs are compiled for it."""

from __future__ import annotations

import dataclasses

from ssd_jax.sampling.rules import RuleName

GAP_CLASSES = 8
"""Classes of the gap between a draft's two best continuations; see `sampling.ranking`."""

MAX_NODES = 31
"""Most nodes of a tree: the bits of a path; see `sampling.topology`."""

RANKS = 6
"""Continuations of a node that may become its children."""

MAX_BRANCHING_DEPTH = 15
"""Most tokens of a path of a tree that branches leave: a path has those before and behind it."""

_MAX_WIDTH = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeShape:
    """The size of a draft's trees; their shape is chosen anew in every round.

    Attributes:
      nodes: m, proposed tokens.
      depth: K, most tokens of a path.
      ranks: continuations of a node that may become its children.
      ancestors: most tokens in front of the pending one that a path includes: K in mode ssd, where
        a branch leaves another tree; else none, and the pending token is not included either.
    """

    nodes: int
    depth: int
    ranks: int = RANKS
    ancestors: int = 0

    @property
    def width(self) -> int:
        """Nodes that a forward of the draft runs: at each depth but the last, the best ones."""
        if self.depth == 1:
            return 1  # none is run
        most = (MAX_NODES - self.stem) // (self.depth - 1)
        return max(1, min(round(self.nodes / 4), most, _MAX_WIDTH))

    @property
    def stem(self) -> int:
        """Entries of a path that come before the draft's runs: ancestors and the pending token."""
        return self.ancestors + 1 if self.ancestors else 0

    @property
    def entries(self) -> int:
        """Keys and values of a branch: of its paths, or of the nodes of a tree to be verified."""
        return max(self.stem + self.runs, self.nodes if self.ancestors else 0, 1)

    @property
    def runs(self) -> int:
        """Nodes that the draft runs in a round."""
        return self.width * (self.depth - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What a draft's programs are compiled for.

    Attributes:
      k: tokens of a proposal.
      support: most ids of a proposal's q; as many as the model has outputs keeps all.
      rule: of the verification, which may need no q.
      branches: M, most branches a sequence; 0 for programs without branches.
      saguaro_c: C of Saguaro sampling; 1 is plain sampling.
      predict: how bonus tokens of sampled rows are ranked: "plain" by the draft's probabilities,
        "noise" also by the noise of their verification.
      confident: whether draws report the draft's probability of their tokens.
      nodes: of a tree; 0 where proposals are chains.
    """

    k: int
    support: int
    rule: RuleName
    branches: int = 0
    saguaro_c: float = 1.0
    predict: str = "plain"
    confident: bool = False
    nodes: int = 0

    @property
    def in_turn(self) -> Drafting:
        """The same without branches, of a draft that proposes when the outcome is known."""
        return dataclasses.replace(self, branches=0, saguaro_c=1.0)

    @property
    def tree(self) -> TreeShape | None:
        """The size of its trees, whose paths have K tokens; None where proposals are chains."""
        ancestors = self.k if self.branches else 0
        return (
            TreeShape(nodes=self.nodes, depth=self.k, ancestors=ancestors) if self.nodes else None
        )
