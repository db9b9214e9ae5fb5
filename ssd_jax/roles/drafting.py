"""What a draft is asked to do, as its programs are compiled for it."""

from __future__ import annotations

import dataclasses

from ssd_jax.sampling.rules import RuleName


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
    """

    k: int
    support: int
    rule: RuleName
    branches: int = 0
    saguaro_c: float = 1.0
    predict: str = "plain"
    confident: bool = False
