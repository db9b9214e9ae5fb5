"""What a forward of the draft costs beside the target's, one text at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.models.functional import FunctionalModel, Parameters
from ssd_jax.tools.bench.perplexity import TeacherForced
from ssd_jax.tools.bench.step import in_turns
from ssd_jax.tuning.throughput import Costs

Model = tuple[FunctionalModel, Parameters]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Medians of forwards with logits of every token.

    Attributes:
      target_ms: of the target's forward of one token.
      target, draft: paired ratios to that forward, by the number of tokens.
    """

    target_ms: float
    target: dict[int, float]
    draft: dict[int, float]

    @property
    def costs(self) -> Costs:
        """Costs for the predictions, in forwards of the target.

        Drafting is a forward of one token. A forward of M branches is assumed to cost as much as
        one of M tokens of a text, and to take nothing from the target.
        """
        return Costs(
            verify={tokens - 1: ratio for tokens, ratio in self.target.items()},
            draft=self.draft[1],
            backup=self.draft[1],
            step={tokens: ratio for tokens, ratio in self.draft.items() if tokens > 1},
        )


def measure_steps(
    target: Model,
    draft: Model,
    *,
    ks: Sequence[int],
    budgets: Sequence[int],
    context: int,
    repeats: int,
    progress: Progress | None = None,
) -> StepCosts:
    """Times all forwards in turn; see `in_turns`.

    Args:
      ks: target forwards of K + 1 tokens.
      budgets: draft forwards of M tokens.
      context: positions of a page; half of them lie before what is run.
    """
    runs = [(target, 1 + k) for k in sorted({0, *ks})]
    runs += [(draft, m) for m in sorted({1, *budgets})]
    forwards = [
        partial(_forward, TeacherForced(*model, longest=context, width=tokens), context // 2)
        for model, tokens in runs
    ]
    for forward in (*forwards, *forwards):
        forward()
    ms = np.array(in_turns(forwards, rounds=repeats, progress=progress))
    ratios = list(zip(runs, np.median(ms / ms[0], axis=1).tolist(), strict=True))
    return StepCosts(
        target_ms=float(np.median(ms[0])),
        target={tokens: ratio for (model, tokens), ratio in ratios if model is target},
        draft={tokens: ratio for (model, tokens), ratio in ratios if model is draft},
    )


def _forward(model: TeacherForced, start: int) -> None:
    jax.block_until_ready(model.chunk(np.zeros(model.width, np.int32), start))
